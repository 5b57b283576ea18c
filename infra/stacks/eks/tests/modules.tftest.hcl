# What each of the other modules promises, looked at where the stack's outputs do not show it.

mock_provider "aws" {
  source = "../mocks"
}

run "network" {
  module {
    source = "../../modules/network"
  }
  variables {
    name                       = "millrace"
    region                     = "us-west-2"
    cidr                       = "10.0.0.0/16"
    zone_ids                   = ["usw2-az4", "usw2-az1"]
    enable_interface_endpoints = false
    endpoints_of_target        = ["eks", "eks-auth", "monitoring"]
    uses_default_group         = false
    permissions_boundary       = "arn:aws:iam::111122223333:policy/boundary"
    flow_log                   = { log_group_arn = "arn:aws:logs:us-west-2:111122223333:log-group:mock" }
  }

  assert {
    condition     = length(aws_default_security_group.this.ingress) == 0 && length(aws_default_security_group.this.egress) == 0
    error_message = "the group that comes with a VPC lets nothing through: ${jsonencode(aws_default_security_group.this)}"
  }

  assert {
    condition     = aws_iam_role.flow_log[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"
    error_message = "every role is bounded"
  }

  assert {
    condition     = toset([aws_subnet.trainium.availability_zone_id, aws_subnet.nodes.availability_zone_id, aws_subnet.public.availability_zone_id]) == toset(["usw2-az4"])
    error_message = "nodes, file system and NAT are in one zone"
  }

  assert {
    condition     = aws_subnet.trainium.cidr_block == "10.0.0.0/19" && aws_subnet.second.availability_zone_id == "usw2-az1"
    error_message = "${aws_subnet.trainium.cidr_block}, ${aws_subnet.second.availability_zone_id}"
  }

  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && length(aws_vpc_endpoint.interface) == 0
    error_message = "S3 through a gateway, and no endpoint that is billed by the hour"
  }
}

# Applied, because a rule names its own group by an id that EC2 gives.
run "security_groups_name_themselves" {
  module {
    source = "../../modules/security-groups"
  }
  variables {
    name   = "millrace"
    vpc_id = "vpc-0"
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.efa.ip_protocol == "-1" && aws_vpc_security_group_egress_rule.efa.ip_protocol == "-1"
    error_message = "EFA needs all traffic in both directions"
  }

  assert {
    condition = alltrue([
      for rules in [aws_vpc_security_group_ingress_rule.fsx, aws_vpc_security_group_egress_rule.fsx] :
      toset([for rule in rules : "${rule.from_port}-${rule.to_port}"]) == toset(["988-988", "1018-1023"])
    ])
    error_message = "Lustre's ports, in both directions"
  }

  assert {
    condition = alltrue([
      for rule in concat(values(aws_vpc_security_group_ingress_rule.fsx), values(aws_vpc_security_group_egress_rule.fsx)) :
      rule.security_group_id == aws_security_group.fsx.id && rule.referenced_security_group_id == aws_security_group.fsx.id
    ])
    error_message = "servers and nodes share one group"
  }

  assert {
    condition = alltrue([
      for rule in [aws_vpc_security_group_ingress_rule.efa, aws_vpc_security_group_egress_rule.efa] :
      rule.security_group_id == aws_security_group.efa.id && rule.referenced_security_group_id == aws_security_group.efa.id
    ])
    error_message = "EFA's group names itself"
  }
}

run "endpoints" {
  command = plan
  module {
    source = "../../modules/network"
  }
  variables {
    name                       = "millrace"
    region                     = "us-west-2"
    cidr                       = "10.0.0.0/16"
    zone_ids                   = ["usw2-az4", "usw2-az1"]
    enable_interface_endpoints = true
    endpoints_of_target        = ["eks", "eks-auth", "monitoring"]
    uses_default_group         = true
    permissions_boundary       = null
  }

  # By one reading of Batch's guide, containers on Trainium nodes have no other group.
  assert {
    condition     = [for rule in aws_default_security_group.this.ingress : [rule.self, rule.protocol]] == [[true, "-1"]]
    error_message = "containers in the default group reach one another, and nobody else reaches them: ${jsonencode(aws_default_security_group.this.ingress)}"
  }

  assert {
    condition     = toset([for rule in aws_default_security_group.this.egress : "${rule.protocol} ${rule.from_port} to ${rule.self == true ? "itself" : join(",", rule.cidr_blocks)}"]) == toset(["-1 0 to itself", "tcp 443 to 0.0.0.0/0"])
    error_message = "containers in the default group reach one another and HTTPS: ${jsonencode(aws_default_security_group.this.egress)}"
  }

  assert {
    condition     = length(aws_flow_log.refused) == 0 && length(aws_iam_role.flow_log) == 0
    error_message = "no flow log unless it is asked for"
  }

  assert {
    condition     = length(aws_vpc_endpoint.interface) == 10 && alltrue([for each in aws_vpc_endpoint.interface : each.private_dns_enabled])
    error_message = "endpoints: ${jsonencode(keys(aws_vpc_endpoint.interface))}"
  }
}

run "storage" {
  module {
    source = "../../modules/storage"
  }
  variables {
    name                   = "millrace"
    region                 = "us-west-2"
    account_id             = "111122223333"
    partition              = "aws"
    keep_data              = true
    log_retention_days     = 90
    enable_data_repository = true
    permissions_boundary   = "arn:aws:iam::111122223333:policy/boundary"
    log_groups             = { control_plane = "/aws/eks/millrace/cluster" }
    fsx                    = { gib = 2400, throughput = 250, subnet_id = "subnet-0", security_group_id = "sg-fsx" }
  }

  assert {
    condition     = [aws_fsx_lustre_file_system.this[0].deployment_type, aws_fsx_lustre_file_system.this[0].data_compression_type, aws_fsx_lustre_file_system.this[0].kms_key_id] == ["PERSISTENT_2", "LZ4", aws_kms_key.this.arn]
    error_message = "file system: ${jsonencode(aws_fsx_lustre_file_system.this[0])}"
  }

  assert {
    condition     = [for each in aws_fsx_data_repository_association.this : each.file_system_path] == ["/checkpoint", "/run"]
    error_message = "checkpoints and the records of runs, and nothing else, are copied to the bucket"
  }

  assert {
    condition     = keys(aws_scheduler_schedule.export) == ["run"] && [for folder, each in aws_fsx_data_repository_association.this : folder if try(length(each.s3[0].auto_export_policy[0].events), 0) > 0] == ["checkpoint"]
    error_message = "files of a run, which change every second, are copied by the hour, and checkpoints at once"
  }

  assert {
    condition = jsondecode(aws_scheduler_schedule.export["run"].target[0].input) == {
      Type = "EXPORT_TO_REPOSITORY", FileSystemId = aws_fsx_lustre_file_system.this[0].id, Paths = ["run"], Report = { Enabled = false }
    }
    error_message = "task: ${aws_scheduler_schedule.export["run"].target[0].input}"
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.export[0].policy).Statement[*].Action == [["fsx:CreateDataRepositoryTask"]] && aws_iam_role.export[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"
    error_message = "the schedule starts exports, and does nothing else: ${aws_iam_role_policy.export[0].policy}"
  }

  assert {
    condition     = aws_s3_bucket_versioning.this.versioning_configuration[0].status == "Enabled" && aws_s3_bucket_lifecycle_configuration.this.rule[0].noncurrent_version_expiration[0].noncurrent_days == 7
    error_message = "replaced and deleted objects stay for a week"
  }

  assert {
    condition     = !aws_s3_bucket.this.force_destroy && aws_s3_bucket.this.bucket == "millrace-111122223333-us-west-2"
    error_message = "a bucket with data is not destroyed"
  }

  assert {
    condition     = alltrue([for group in aws_cloudwatch_log_group.this : group.retention_in_days == 90 && group.kms_key_id == aws_kms_key.this.arn])
    error_message = "logs end, and are encrypted"
  }
}

run "registry" {
  command = plan
  module {
    source = "../../modules/registry"
  }
  variables {
    prefix    = "millrace"
    images    = ["head", "trainer"]
    key_arn   = "arn:aws:kms:us-west-2:111122223333:key/11111111-2222-3333-4444-555555555555"
    keep_data = false
  }

  assert {
    condition     = alltrue([for each in aws_ecr_repository.this : each.image_tag_mutability == "IMMUTABLE" && each.image_scanning_configuration[0].scan_on_push && each.force_delete])
    error_message = "repositories: ${jsonencode(aws_ecr_repository.this)}"
  }

  assert {
    condition     = alltrue([for each in aws_ecr_lifecycle_policy.this : jsondecode(each.policy).rules[*].selection.tagStatus == ["untagged"]])
    error_message = "an image with a tag never goes by itself: a node that is replaced pulls it by its digest"
  }
}

run "eks" {
  module {
    source = "../../modules/eks"
  }
  variables {
    name                      = "millrace"
    account                   = { id = "111122223333", partition = "aws", region = "us-west-2" }
    kubernetes_version        = "1.35"
    kubernetes_support        = "STANDARD"
    ami_release               = "1.35.4-20260505"
    permissions_boundary      = "arn:aws:iam::111122223333:policy/boundary"
    api_public_cidrs          = []
    key_arn                   = "arn:aws:kms:us-west-2:111122223333:key/11111111-2222-3333-4444-555555555555"
    log_group_arns            = ["arn:aws:logs:us-west-2:111122223333:log-group:mock"]
    core_pool                 = { "millrace.dev/pool" = "core" }
    trainium_pod_addresses    = { least = 12, spare = 4 }
    caller_arn                = "arn:aws:iam::111122223333:role/first"
    administrators            = ["arn:aws:iam::111122223333:role/platform", "arn:aws:iam::111122223333:role/first"]
    operators                 = ["arn:aws:iam::111122223333:role/research", "arn:aws:iam::111122223333:role/platform", "arn:aws:iam::111122223333:role/first"]
    operators_group           = "millrace-deployers"
    bucket_arn                = "arn:aws:s3:::bucket"
    namespace                 = "millrace"
    bucket_users              = ["tokenizer"]
    node_scalers              = ["deployer"]
    scaled_node_groups        = ["trainium"]
    addon_versions            = { vpc-cni = "v1.20.0-eksbuild.1" }
    enable_addons             = true
    enable_container_insights = true
    metrics_log_group_arn     = "arn:aws:logs:us-west-2:111122223333:log-group:metrics"
    pod_logs = {
      trainer   = { log_group = "/millrace/trainer", log_group_arn = "arn:aws:logs:us-west-2:111122223333:log-group:trainer", files = ["/a", "/b"], excluded_files = [] }
      operators = { log_group = "/millrace/operators", log_group_arn = "arn:aws:logs:us-west-2:111122223333:log-group:operators", files = ["/c"], excluded_files = ["/d"] }
    }
    enable_pod_identity   = true
    enable_access_entries = true
    tags                  = { "millrace.dev/stack" = "millrace", "millrace.dev/run" = "llama2-7b" }
    network               = { control_plane_subnet_ids = ["subnet-0", "subnet-1"], nodes_subnet_id = "subnet-0", fsx_security_group_id = "sg-fsx", routes = {} }
    pools = {
      core = { shape = "m7i.2xlarge", nodes = 2, min_nodes = 1, max_nodes = 3, volume_gib = 100, labels = { "millrace.dev/pool" = "core" } }
    }
  }

  assert {
    condition = alltrue([
      for each in aws_launch_template.pool["core"].tag_specifications :
      each.tags == tomap({ "millrace.dev/stack" = "millrace", "millrace.dev/run" = "llama2-7b", Name = "millrace-core" })
    ])
    error_message = "tags of nodes and their volumes: ${jsonencode(aws_launch_template.pool["core"].tag_specifications)}"
  }

  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].endpoint_private_access && !aws_eks_cluster.this.vpc_config[0].endpoint_public_access
    error_message = "without addresses the API is the VPC's alone"
  }

  assert {
    condition     = !aws_eks_cluster.this.bootstrap_self_managed_addons && aws_eks_cluster.this.upgrade_policy[0].support_type == "STANDARD" && length(aws_eks_cluster.this.enabled_cluster_log_types) == 5
    error_message = "no add-ons of EKS' own, no extended support, all logs"
  }

  assert {
    condition     = aws_eks_cluster.this.access_config[0].authentication_mode == "API" && aws_eks_access_entry.operator["arn:aws:iam::111122223333:role/research"].kubernetes_groups == toset(["millrace-deployers"])
    error_message = "operators are a group of Kubernetes"
  }

  assert {
    condition     = keys(aws_eks_access_entry.operator) == ["arn:aws:iam::111122223333:role/research"] && keys(aws_eks_access_entry.administrator) == ["arn:aws:iam::111122223333:role/platform"]
    error_message = "EKS takes one entry a principal, and an administrator needs no second: ${jsonencode([keys(aws_eks_access_entry.operator), keys(aws_eks_access_entry.administrator)])}"
  }

  assert {
    condition = (
      aws_eks_access_entry.creator.principal_arn == "arn:aws:iam::111122223333:role/first" &&
      toset([for each in concat([aws_eks_access_policy_association.creator], values(aws_eks_access_policy_association.administrator)) : each.policy_arn]) == toset(["arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"])
    )
    error_message = "who applies first administers the cluster, with those that are listed: ${aws_eks_access_entry.creator.principal_arn}"
  }

  assert {
    condition     = alltrue([for role in concat(values(aws_iam_role.pod), values(aws_iam_role.addon), [aws_iam_role.cluster, aws_iam_role.node]) : role.permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"])
    error_message = "every role is bounded"
  }

  assert {
    condition     = alltrue([for each in aws_iam_role.pod : each.force_detach_policies])
    error_message = "a budget that has acted keeps no role from being deleted"
  }

  assert {
    condition     = aws_eks_pod_identity_association.pod["tokenizer"].namespace == "millrace" && aws_eks_pod_identity_association.pod["tokenizer"].service_account == "tokenizer"
    error_message = "identity of ${aws_eks_pod_identity_association.pod["tokenizer"].namespace}/${aws_eks_pod_identity_association.pod["tokenizer"].service_account}"
  }

  assert {
    condition     = keys(aws_iam_role.pod) == ["deployer", "tokenizer"]
    error_message = "a stage that calls nothing of AWS has no role: ${jsonencode(keys(aws_iam_role.pod))}"
  }

  assert {
    condition     = alltrue([for each in aws_launch_template.pool : each.metadata_options[0].http_tokens == "required" && each.metadata_options[0].http_put_response_hop_limit == 1])
    error_message = "no pod gets its node's credentials: ${jsonencode(aws_launch_template.pool["core"].metadata_options)}"
  }

  assert {
    condition     = aws_eks_node_group.pool["core"].labels == tomap({ "millrace.dev/pool" = "core" }) && aws_eks_node_group.pool["core"].ami_type == "AL2023_x86_64_STANDARD" && aws_eks_node_group.pool["core"].release_version == "1.35.4-20260505"
    error_message = "core: ${jsonencode(aws_eks_node_group.pool["core"].labels)}, ${aws_eks_node_group.pool["core"].ami_type}, ${aws_eks_node_group.pool["core"].release_version}"
  }

  assert {
    condition     = toset(keys(aws_eks_addon.before_nodes)) == toset(["vpc-cni", "kube-proxy", "eks-pod-identity-agent"]) && aws_eks_addon.before_nodes["vpc-cni"].addon_version == "v1.20.0-eksbuild.1"
    error_message = "before nodes: ${jsonencode(keys(aws_eks_addon.before_nodes))}"
  }

  assert {
    condition     = toset(keys(aws_eks_addon.after_nodes)) == toset(["coredns", "metrics-server", "aws-fsx-csi-driver", "aws-ebs-csi-driver", "eks-node-monitoring-agent", "amazon-cloudwatch-observability"])
    error_message = "after nodes: ${jsonencode(keys(aws_eks_addon.after_nodes))}"
  }

  assert {
    condition     = jsondecode(aws_eks_addon.before_nodes["vpc-cni"].configuration_values).enableNetworkPolicy == "true"
    error_message = "network policies are enforced"
  }

  assert {
    condition = jsonencode([
      for found in regexall("(?m)^ +(?:Path|Exclude_Path|log_group_name|auto_create_group) +(.+)$", jsondecode(aws_eks_addon.after_nodes["amazon-cloudwatch-observability"].configuration_values).containerLogs.fluentBit.config.extraFiles["application-log.conf"]) :
      found[0]
    ]) == jsonencode(["/c", "/d", "/millrace/operators", "false", "/a,/b", "/millrace/trainer", "false"])
    error_message = "files and their log groups: ${aws_eks_addon.after_nodes["amazon-cloudwatch-observability"].configuration_values}"
  }

  assert {
    condition = alltrue([
      for name in ["dataplane-log.conf", "host-log.conf"] :
      !strcontains(jsondecode(aws_eks_addon.after_nodes["amazon-cloudwatch-observability"].configuration_values).containerLogs.fluentBit.config.extraFiles[name], "[")
    ])
    error_message = "the nodes' services send no logs"
  }

  assert {
    condition     = toset(jsondecode(aws_iam_role_policy.cloudwatch[0].policy).Statement[0].Resource) == toset([for name in ["metrics", "trainer", "operators"] : "arn:aws:logs:us-west-2:111122223333:log-group:${name}:*"]) && !strcontains(aws_iam_role_policy.cloudwatch[0].policy, "CreateLogGroup")
    error_message = "the add-on writes to these log groups alone: ${aws_iam_role_policy.cloudwatch[0].policy}"
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.pod["tokenizer"].policy).Statement[1].Resource == ["arn:aws:s3:::bucket/tokenizer/*"]
    error_message = "tokenizer: ${aws_iam_role_policy.pod["tokenizer"].policy}"
  }

  assert {
    condition = jsonencode(jsondecode(aws_iam_role_policy.pod["deployer"].policy).Statement) == jsonencode([{
      Action   = ["eks:DescribeNodegroup", "eks:UpdateNodegroupConfig"]
      Effect   = "Allow"
      Resource = ["arn:aws:eks:us-west-2:111122223333:nodegroup/millrace/trainium/*"]
    }])
    error_message = "deployer: ${aws_iam_role_policy.pod["deployer"].policy}"
  }

}

run "guardrails" {
  module {
    source = "../../modules/guardrails"
  }
  variables {
    name                       = "millrace"
    account                    = { id = "111122223333", partition = "aws", region = "us-west-2" }
    key_arn                    = "arn:aws:kms:us-west-2:111122223333:key/11111111-2222-3333-4444-555555555555"
    budget                     = { monthly_dollars = 5000 }
    permissions_boundary       = "arn:aws:iam::111122223333:policy/boundary"
    emails                     = ["you@example.com"]
    stopped_roles              = [{ name = "millrace-us-west-2-deployer", arn = "arn:aws:iam::111122223333:role/millrace-us-west-2-deployer" }]
    denied_actions             = ["eks:UpdateNodegroupConfig"]
    trainium_autoscaling_group = "eks-trainium"
    trainium_max_nodes         = 4
    zero_schedule              = { cron = "0 20 * * FRI", time_zone = "Europe/Berlin" }
    idle_alarm                 = { percent = 1, minutes = 60 }
    job_queue_arns             = []
  }

  assert {
    condition     = length(aws_cloudwatch_event_rule.job) == 0 && length(jsondecode(aws_sns_topic_policy.this.policy).Statement) == 1
    error_message = "without Batch no rule tells of its jobs"
  }

  assert {
    condition     = toset([for each in aws_budgets_budget.this[0].notification : "${each.notification_type} ${each.threshold}"]) == toset(["ACTUAL 50", "ACTUAL 80", "ACTUAL 100", "FORECASTED 100"])
    error_message = "notifications: ${jsonencode(aws_budgets_budget.this[0].notification)}"
  }

  assert {
    condition     = aws_budgets_budget_action.stop[0].approval_model == "AUTOMATIC" && aws_budgets_budget_action.stop[0].definition[0].iam_action_definition[0].roles == toset(["millrace-us-west-2-deployer"])
    error_message = "over the budget the deployer raises nothing; the reaper still lowers"
  }

  assert {
    condition     = aws_iam_role.budget[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"
    error_message = "every role is bounded"
  }

  assert {
    condition     = jsondecode(aws_iam_policy.stop[0].policy).Statement[0].Action == ["eks:UpdateNodegroupConfig"]
    error_message = "denied: ${aws_iam_policy.stop[0].policy}"
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.budget[0].policy).Statement[0].Resource == ["arn:aws:iam::111122223333:role/millrace-us-west-2-deployer"]
    error_message = "the budget attaches one policy to these roles: ${aws_iam_role_policy.budget[0].policy}"
  }

  assert {
    condition     = aws_autoscaling_schedule.zero[0].desired_capacity == 0 && aws_autoscaling_schedule.zero[0].max_size == 4
    error_message = "the schedule takes nodes away and lets a deployment bring new ones"
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.idle[0].evaluation_periods == 12 && aws_cloudwatch_metric_alarm.idle[0].treat_missing_data == "notBreaching"
    error_message = "an hour of nothing; no nodes are no alarm"
  }
}
