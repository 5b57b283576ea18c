# The whole stack, planned or applied against a provider that is none: no network, no credentials.

mock_provider "aws" {
  source = "../mocks"
}

variables {
  region  = "us-west-2"
  zone_id = "usw2-az4"
}

run "what_two_lines_of_tfvars_give" {
  # Applied, because outputs are what is asked.

  assert {
    condition     = local.tags == { "millrace.dev/stack" = "millrace" }
    error_message = "tags of a stack that several runs share: ${jsonencode(local.tags)}"
  }

  assert {
    condition     = output.trainium_shape == "trn1.32xlarge" && output.cpu_shape == "m7i.8xlarge"
    error_message = "shapes: ${output.trainium_shape}, ${output.cpu_shape}"
  }

  assert {
    condition     = output.trainium_node_group == "trainium" && output.cpu_node_group == "cpu" && output.cluster_name == "millrace"
    error_message = "names: ${output.cluster_name}/${output.trainium_node_group}, ${output.cpu_node_group}"
  }

  assert {
    condition     = output.registry == "111122223333.dkr.ecr.us-west-2.amazonaws.com"
    error_message = "registry: ${output.registry}"
  }

  assert {
    condition = output.repositories == {
      head = "millrace/head", tokenizer = "millrace/tokenizer", compiler = "millrace/compiler", trainer = "millrace/trainer"
    }
    error_message = "repositories: ${jsonencode(output.repositories)}"
  }

  assert {
    condition     = [output.fsx_id, output.fsx_mount_name, output.fsx_gib] == ["fs-0123456789abcdef0", "mockmnt", 1200]
    error_message = "file system: ${output.fsx_id}, ${output.fsx_mount_name}, ${output.fsx_gib}"
  }

  assert {
    condition     = toset(keys(output.pod_identities)) == toset(["tokenizer", "deployer", "reaper"])
    error_message = "identities: ${jsonencode(keys(output.pod_identities))}"
  }

  assert {
    condition     = output.node_labels.trainium["millrace.dev/pool"] == "trainium"
    error_message = "labels: ${jsonencode(output.node_labels)}"
  }

  assert {
    condition     = jsonencode(output.node_taints) == jsonencode({ core = [], cpu = [], trainium = [{ effect = "NoSchedule", key = "aws.amazon.com/neuron", value = "true" }] })
    error_message = "taints: ${jsonencode(output.node_taints)}"
  }

  # As the node groups have them, not as the outputs tell.
  assert {
    condition = jsonencode(merge(module.eks.node_labels, { trainium = module.trainium.node_labels })) == jsonencode({
      for pool, shape in merge(module.eks.shapes, { trainium = module.trainium.shape }) :
      pool => { "millrace.dev/pool" = pool, "millrace.dev/shape" = shape }
    })
    error_message = "labels: ${jsonencode(module.eks.node_labels)}, ${jsonencode(module.trainium.node_labels)}"
  }

  assert {
    condition     = merge(module.eks.shapes, { trainium = module.trainium.shape }) == { core = "m7i.2xlarge", cpu = "m7i.8xlarge", trainium = "trn1.32xlarge" }
    error_message = "shapes: ${jsonencode(module.eks.shapes)}, ${module.trainium.shape}"
  }

  assert {
    condition     = module.eks.volume_gib == { core = 100, cpu = 200 }
    error_message = "root volumes: ${jsonencode(module.eks.volume_gib)}; the CPU nodes' has room for what infra/shapes.json lets a pod write"
  }

  assert {
    condition     = module.trainium.node_taints == [{ key = "aws.amazon.com/neuron", value = "true", effect = "NO_SCHEDULE" }]
    error_message = "taints: ${jsonencode(module.trainium.node_taints)}"
  }

  assert {
    condition     = toset(module.eks.pod_identity_namespaces) == toset(["millrace"])
    error_message = "namespaces of identities: ${jsonencode(module.eks.pod_identity_namespaces)}"
  }

  assert {
    condition     = output.addresses_per_node == 24
    error_message = "addresses: ${output.addresses_per_node}"
  }

  assert {
    condition     = length(module.guardrails.stopped_roles) == 0
    error_message = "no sum, no budget: ${jsonencode(module.guardrails.stopped_roles)}"
  }

  assert {
    condition     = output.capacity_ends_at == "" && output.namespace == "millrace"
    error_message = "${output.capacity_ends_at}, ${output.namespace}"
  }

  assert {
    condition     = merge(module.eks.ami_releases, { trainium = module.trainium.ami_release }) == { core = "1.35.4-20260505", cpu = "1.35.4-20260505", trainium = "1.35.4-20260505" }
    error_message = "every group has one release, and none the newest of the day: ${jsonencode(module.eks.ami_releases)}, ${module.trainium.ami_release}"
  }

  assert {
    condition     = module.eks.addon_versions["kube-proxy"] == "v1.35.3-eksbuild.2"
    error_message = "add-ons: ${jsonencode(module.eks.addon_versions)}"
  }

  assert {
    condition     = toset(values(module.storage.log_groups)) == toset(concat(["/aws/eks/millrace/cluster", "/aws/containerinsights/millrace/performance", "/aws/fsx/millrace"], [for name in ["flow", "head", "tokenizer", "compiler", "trainer", "operators"] : "/millrace/${name}"]))
    error_message = "log groups that would be kept for ever: ${jsonencode(module.storage.log_groups)}"
  }

  assert {
    condition     = module.eks.administrators == ["arn:aws:iam::111122223333:role/platform"]
    error_message = "administrators: ${jsonencode(module.eks.administrators)}"
  }
}

run "applied_again_by_somebody_else" {
  override_data {
    target = data.aws_iam_session_context.current
    values = { issuer_arn = "arn:aws:iam::111122223333:role/night-shift" }
  }

  assert {
    condition     = module.eks.administrators == ["arn:aws:iam::111122223333:role/platform"]
    error_message = "who administered the cluster before does so still: ${jsonencode(module.eks.administrators)}"
  }
}

run "applied_again_by_somebody_else_who_is_listed" {
  variables {
    administrators = ["arn:aws:iam::111122223333:role/night-shift", "arn:aws:iam::111122223333:role/platform"]
  }
  override_data {
    target = data.aws_iam_session_context.current
    values = { issuer_arn = "arn:aws:iam::111122223333:role/night-shift" }
  }

  assert {
    condition     = module.eks.administrators == ["arn:aws:iam::111122223333:role/platform", "arn:aws:iam::111122223333:role/night-shift"]
    error_message = "both: ${jsonencode(module.eks.administrators)}"
  }
}

run "newer_nodes" {
  command = plan
  variables {
    ami_release     = "20260625"
    cpu_ami_release = "20260714"
    addon_versions  = { vpc-cni = "v1.20.0-eksbuild.1" }
  }
  override_data {
    target = data.aws_ami.node["neuron"]
    values = { description = "of a day, (k8s: 1.35.6, containerd: 2.2.*)" }
  }
  override_data {
    target = data.aws_ami.node["standard"]
    values = { description = "of a later day, (k8s: 1.35.10, containerd: 2.2.*)" }
  }

  assert {
    condition     = merge(module.eks.ami_releases, { trainium = module.trainium.ami_release }) == { core = "1.35.10-20260714", cpu = "1.35.10-20260714", trainium = "1.35.6-20260625" }
    error_message = "releases: ${jsonencode(module.eks.ami_releases)}, ${module.trainium.ami_release}"
  }

  assert {
    condition     = [module.eks.addon_versions["kube-proxy"], module.eks.addon_versions["vpc-cni"]] == ["v1.35.3-eksbuild.2", "v1.20.0-eksbuild.1"]
    error_message = "add-ons: ${jsonencode(module.eks.addon_versions)}"
  }
}

run "the_longest_name_in_the_longest_region" {
  variables {
    region  = "ap-southeast-2"
    zone_id = "apse2-az1"
    name    = "a-name-of-twenty-four-ab"
  }

  assert {
    condition     = output.cluster_name == "a-name-of-twenty-four-ab"
    error_message = "name: ${output.cluster_name}"
  }
}

run "operators_whom_no_policy_can_be_attached_to" {
  command = plan
  variables {
    operators = [
      "arn:aws:iam::111122223333:role/research",
      "arn:aws:iam::111122223333:role/aws-reserved/sso.amazonaws.com/us-west-2/AWSReservedSSO_Research_0123456789abcdef",
      "arn:aws:iam::111122223333:user/you",
      "arn:aws:iam::444455556666:role/elsewhere",
    ]
    budget = { monthly_dollars = 5000 }
  }

  assert {
    condition     = toset(module.guardrails.stopped_roles) == toset(["millrace-us-west-2-deployer", "research"])
    error_message = "stopped: ${jsonencode(module.guardrails.stopped_roles)}"
  }
}

run "another_shape_in_another_region_is_three_lines" {
  command = plan
  variables {
    region   = "us-east-2"
    zone_id  = "use2-az3"
    trainium = { shape = "trn2.48xlarge", max_nodes = 2 }
  }

  assert {
    condition     = module.network.trainium_subnet.zone_id == "use2-az3" && output.trainium_shape == "trn2.48xlarge"
    error_message = "zone: ${module.network.trainium_subnet.zone_id}"
  }
}

run "an_ultraserver_in_a_capacity_block" {
  command = plan
  variables {
    region   = "ap-south-2"
    zone_id  = "aps2-az1"
    trainium = { shape = "trn2u.48xlarge", max_nodes = 4 }
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0", ends_at = "2027-01-31T11:30:00Z" }
  }

  assert {
    condition     = output.trainium_shape == "trn2u.48xlarge" && output.trainium_max_nodes == 4
    error_message = "shape: ${output.trainium_shape}, nodes: ${output.trainium_max_nodes}"
  }
}

run "trn1n_with_sixteen_cards" {
  command = plan
  variables {
    trainium = { shape = "trn1n.32xlarge", max_nodes = 16 }
  }

  assert {
    condition     = output.trainium_max_nodes == 16
    error_message = "nodes: ${output.trainium_max_nodes}"
  }
}

run "a_capacity_block" {
  command = plan
  variables {
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0", ends_at = "2027-01-31T11:30:00Z" }
  }

  assert {
    condition     = output.capacity_ends_at == "2027-01-31T11:30:00Z"
    error_message = "end: ${output.capacity_ends_at}"
  }
}

run "a_reservation_in_a_placement_group" {
  command = plan
  variables {
    capacity        = { kind = "reservation", reservation_id = "cr-0123456789abcdef0" }
    placement_group = "ours"
  }

  assert {
    condition     = output.capacity_ends_at == ""
    error_message = "end: ${output.capacity_ends_at}"
  }
}

run "a_small_vpc_with_interfaces_that_have_no_address" {
  command = plan
  variables {
    network    = { cidr = "10.9.0.0/22" }
    efa_layout = "efa-only"
    trainium   = { max_nodes = 6 }
  }

  assert {
    condition     = module.network.trainium_subnet.cidr == "10.9.0.0/25"
    error_message = "cidr: ${module.network.trainium_subnet.cidr}"
  }
}

run "a_stack_for_one_run" {
  command = plan
  variables {
    run = "llama2-7b-0123abcd"
  }

  assert {
    condition     = local.tags == { "millrace.dev/stack" = "millrace", "millrace.dev/run" = "llama2-7b-0123abcd" }
    error_message = "tags: ${jsonencode(local.tags)}"
  }
}

run "with_everything_optional" {
  variables {
    enable_interface_endpoints = true
    api_public_cidrs           = ["203.0.113.7/32"]
    operators                  = ["arn:aws:iam::111122223333:role/research"]
    budget                     = { monthly_dollars = 5000, emails = ["you@example.com"] }
    zero_schedule              = { cron = "0 20 * * FRI" }
    keep_data                  = false
    permissions_boundary       = "arn:aws:iam::111122223333:policy/boundary"
  }

  assert {
    condition     = module.trainium.autoscaling_group == "eks-trainium-mock"
    error_message = "group: ${module.trainium.autoscaling_group}"
  }
}

run "logs_without_the_idle_alarm" {
  command = plan
  variables {
    idle_alarm = null
  }

  assert {
    condition     = contains(keys(module.storage.log_groups), "trainer") && contains(keys(module.eks.addon_versions), "amazon-cloudwatch-observability")
    error_message = "one add-on sends both: ${jsonencode(module.storage.log_groups)}"
  }
}

run "the_idle_alarm_without_logs" {
  command = plan
  variables {
    enable_pod_logs = false
  }

  assert {
    condition     = !contains(keys(module.storage.log_groups), "trainer") && contains(keys(module.eks.addon_versions), "amazon-cloudwatch-observability")
    error_message = "one add-on sends both: ${jsonencode(module.storage.log_groups)}"
  }
}

run "with_nothing_optional" {
  variables {
    enable_fsx            = false
    enable_addons         = false
    enable_pod_identity   = false
    enable_access_entries = false
    enable_flow_log       = false
    idle_alarm            = null
    placement_group       = "none"
  }

  assert {
    condition     = [output.fsx_id, output.fsx_dns_name, output.fsx_mount_name] == ["", "", ""] && output.pod_identities == {}
    error_message = "${output.fsx_id}, ${jsonencode(output.pod_identities)}"
  }

  assert {
    condition     = !contains(keys(module.storage.log_groups), "container_insights")
    error_message = "nothing writes there: ${jsonencode(module.storage.log_groups)}"
  }
}
