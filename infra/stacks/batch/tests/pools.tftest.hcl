# What Batch and EC2 would be asked for, for each way to have Trainium nodes, and what a node reads when it starts.

mock_provider "aws" {
  source = "../mocks"

  mock_resource "aws_security_group" {
    defaults = { id = "sg-0123456789abcdef0" }
  }
}

variables {
  name    = "millrace"
  account = { id = "111122223333", partition = "aws", region = "us-west-2" }
  key_arn = "arn:aws:kms:us-west-2:111122223333:key/11111111-2222-3333-4444-555555555555"
  trainium = {
    shape     = { name = "trn1.32xlarge", vcpus = 128, neuron_devices = 16, efa_cards = 8, huge_pages_gib = 10, supports_capacity_block = true, supports_placement_group = true }
    max_nodes = 4
    subnet_id = "subnet-trainium"
  }
  cpu                  = { shape = { name = "m7i.8xlarge", vcpus = 32, storage_gib = 100 }, max_nodes = 3, subnet_id = "subnet-nodes" }
  security_group_ids   = ["sg-efa", "sg-fsx"]
  makes_node_group     = true
  vpc_id               = "vpc-0"
  ready_for_nodes      = {}
  instance_profile     = null
  file_system          = { dns_name = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com", mount_name = "mockmnt" }
  stages               = ["tokenizer", "compiler", "trainer"]
  bucket_users         = ["tokenizer"]
  permissions_boundary = "arn:aws:iam::111122223333:policy/boundary"
  bucket_arn           = "arn:aws:s3:::mock-bucket"
  hugging_face_secret  = null
  webhook_secret       = null
  stop_seconds         = 330
  queue_limits         = { capacity_seconds = 7200, misconfiguration_seconds = 600 }
  efa_layout           = "efa"
  capacity             = { kind = "on_demand", reservation_id = "" }
  placement_group      = "auto"
  ami_id               = "ami-0123456789abcdef0"
  tags                 = { "millrace.dev/stack" = "millrace" }
}

# Applied, because groups name themselves by ids.
run "on_demand" {
  module {
    source = "../../modules/batch"
  }

  assert {
    condition = [for each in aws_launch_template.pool["trainium"].network_interfaces : [each.network_card_index, each.device_index, each.interface_type]] == [
      [0, 0, "efa"], [1, 1, "efa"], [2, 1, "efa"], [3, 1, "efa"], [4, 1, "efa"], [5, 1, "efa"], [6, 1, "efa"], [7, 1, "efa"],
    ]
    error_message = "interfaces: ${jsonencode(aws_launch_template.pool["trainium"].network_interfaces)}"
  }

  assert {
    condition = alltrue([
      for each in aws_launch_template.pool["trainium"].network_interfaces :
      each.security_groups == toset(["sg-efa", "sg-fsx", "sg-0123456789abcdef0"]) && each.associate_public_ip_address == null
    ])
    error_message = "every interface is in EFA's, Lustre's and the nodes' groups and asks for no public address"
  }

  assert {
    condition = (
      aws_batch_compute_environment.pool["cpu"].compute_resources[0].security_group_ids == toset(["sg-efa", "sg-fsx", "sg-0123456789abcdef0"]) &&
      aws_launch_template.pool["cpu"].vpc_security_group_ids == null && length(aws_launch_template.pool["cpu"].network_interfaces) == 0
    )
    error_message = "groups of CPU nodes are named where their containers get them too: ${jsonencode(aws_batch_compute_environment.pool["cpu"].compute_resources)}"
  }

  assert {
    condition     = aws_batch_compute_environment.pool["trainium"].compute_resources[0].security_group_ids == null
    error_message = "Batch refuses groups beside a launch template with interfaces: ${jsonencode(aws_batch_compute_environment.pool["trainium"].compute_resources)}"
  }

  assert {
    condition = alltrue([
      for pool, most in { trainium = 512, cpu = 96 } :
      [for each in [aws_batch_compute_environment.pool[pool].compute_resources[0]] : [each.min_vcpus, each.max_vcpus, each.type, each.allocation_strategy]] == [[0, most, "EC2", "BEST_FIT_PROGRESSIVE"]]
    ])
    error_message = "vCPUs: ${jsonencode(aws_batch_compute_environment.pool["trainium"].compute_resources)}"
  }

  assert {
    condition = (
      aws_batch_compute_environment.pool["trainium"].compute_resources[0].ec2_configuration[0].image_type == "ECS_AL2023" &&
      aws_batch_compute_environment.pool["trainium"].compute_resources[0].ec2_configuration[0].image_id_override == "ami-0123456789abcdef0"
    )
    error_message = "the AMI with Neuron, which Batch has no type for"
  }

  assert {
    condition = (
      aws_batch_compute_environment.pool["trainium"].compute_resources[0].instance_type == toset(["trn1.32xlarge"]) &&
      aws_batch_compute_environment.pool["trainium"].compute_resources[0].subnets == toset(["subnet-trainium"]) &&
      aws_batch_compute_environment.pool["cpu"].compute_resources[0].instance_type == toset(["m7i.8xlarge"]) &&
      aws_batch_compute_environment.pool["cpu"].compute_resources[0].subnets == toset(["subnet-nodes"])
    )
    error_message = "one type and one subnet a pool"
  }

  assert {
    condition     = aws_placement_group.trainium[0].strategy == "cluster" && aws_batch_compute_environment.pool["trainium"].compute_resources[0].placement_group == "millrace-trainium" && aws_batch_compute_environment.pool["cpu"].compute_resources[0].placement_group == null
    error_message = "Trainium nodes on demand are placed close to each other, CPU nodes where there is room"
  }

  assert {
    condition     = length(aws_launch_template.pool["trainium"].instance_market_options) == 0 && length(aws_launch_template.pool["trainium"].capacity_reservation_specification) == 0
    error_message = "nothing is reserved"
  }

  assert {
    condition = alltrue([
      for template in aws_launch_template.pool :
      template.metadata_options[0].http_tokens == "required" && template.metadata_options[0].http_put_response_hop_limit == 1 && template.block_device_mappings[0].ebs[0].encrypted == "true"
    ])
    error_message = "the node's credentials are for the node alone, and its disk is encrypted"
  }

  assert {
    condition = alltrue([
      for pool in ["trainium", "cpu"] :
      { for limit in aws_batch_job_queue.pool[pool].job_state_time_limit_action : limit.reason => [limit.action, limit.state, limit.max_time_seconds] } == {
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"           = ["CANCEL", "RUNNABLE", 7200]
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE" = ["CANCEL", "RUNNABLE", 600]
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"         = ["CANCEL", "RUNNABLE", 600]
      }
    ])
    error_message = "stuck jobs: ${jsonencode(aws_batch_job_queue.pool["trainium"].job_state_time_limit_action)}"
  }

  assert {
    condition     = output.queues == { trainium = "millrace-trainium", cpu = "millrace-cpu" }
    error_message = "queues: ${jsonencode(output.queues)}"
  }

  assert {
    condition = alltrue([
      for rule in [aws_vpc_security_group_ingress_rule.nodes[0], aws_vpc_security_group_egress_rule.nodes[0]] :
      rule.ip_protocol == "-1" && rule.security_group_id == aws_security_group.nodes[0].id && rule.referenced_security_group_id == aws_security_group.nodes[0].id
    ])
    error_message = "nodes of a job reach one another"
  }

  assert {
    condition     = toset([for each in aws_iam_role_policy_attachment.instance : basename(each.policy_arn)]) == toset(["AmazonEC2ContainerServiceforEC2Role", "AmazonSSMManagedInstanceCore"])
    error_message = "a node joins ECS and can be looked at: ${jsonencode(keys(aws_iam_role_policy_attachment.instance))}"
  }

  assert {
    condition     = toset([for role in aws_iam_role.job : role.name]) == toset(["millrace-us-west-2-tokenizer", "millrace-us-west-2-compiler", "millrace-us-west-2-trainer"])
    error_message = "every stage has a role, and none of its node's rights: ${jsonencode(keys(aws_iam_role.job))}"
  }

  assert {
    condition = (
      keys(aws_iam_role_policy.job) == ["tokenizer"] &&
      jsondecode(aws_iam_role_policy.job["tokenizer"].policy).Statement[0].Condition.StringLike["s3:prefix"] == ["tokenizer/*"] &&
      jsondecode(aws_iam_role_policy.job["tokenizer"].policy).Statement[1].Resource == ["arn:aws:s3:::mock-bucket/tokenizer/*"]
    )
    error_message = "the tokenizer has its prefix of the bucket, the others nothing of it: ${jsonencode(keys(aws_iam_role_policy.job))}"
  }

  assert {
    condition     = alltrue([for role in concat(values(aws_iam_role.job), aws_iam_role.instance) : role.permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"])
    error_message = "every role is bounded"
  }

  assert {
    condition     = length(aws_iam_role.execution) == 0 && output.execution_role == null
    error_message = "no secret, no execution role"
  }

  assert {
    condition = alltrue([
      for pool in ["trainium", "cpu"] :
      base64decode(aws_launch_template.pool[pool].user_data) == output.user_data[pool] &&
      strcontains(output.user_data[pool], "ECS_CONTAINER_STOP_TIMEOUT=330s") &&
      strcontains(output.user_data[pool], "source=fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com@tcp:/mockmnt") &&
      strcontains(output.user_data[pool], "touch \"$folder/.millrace-root\"") &&
      length(output.user_data[pool]) < 16384
    ])
    error_message = "user data: ${output.user_data.cpu}"
  }

  assert {
    condition     = strcontains(output.user_data.trainium, "pages=5128") && strcontains(output.user_data.trainium, "version=1.41.0") && !strcontains(output.user_data.cpu, "efa_installer") && !strcontains(output.user_data.cpu, "pages=")
    error_message = "huge pages and EFA are the Trainium nodes' alone"
  }
}

run "interfaces_without_addresses" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    efa_layout = "efa-only"
  }

  assert {
    condition     = [for each in aws_launch_template.pool["trainium"].network_interfaces : each.interface_type] == ["efa", "efa-only", "efa-only", "efa-only", "efa-only", "efa-only", "efa-only", "efa-only"]
    error_message = "only the first interface has an address"
  }
}

run "sixteen_cards" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    trainium = {
      shape     = { name = "trn2.48xlarge", vcpus = 192, neuron_devices = 16, efa_cards = 16, huge_pages_gib = 10, supports_capacity_block = true, supports_placement_group = true }
      max_nodes = 2
      subnet_id = "subnet-trainium"
    }
  }

  assert {
    condition     = aws_launch_template.pool["trainium"].network_interfaces[*].network_card_index == range(16) && aws_batch_compute_environment.pool["trainium"].compute_resources[0].max_vcpus == 384
    error_message = "an interface on each card"
  }
}

run "a_capacity_block" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0" }
  }

  assert {
    condition     = aws_launch_template.pool["trainium"].instance_market_options[0].market_type == "capacity-block" && aws_launch_template.pool["trainium"].instance_type == "trn1.32xlarge"
    error_message = "EC2 has to be told, with the type"
  }

  assert {
    condition     = aws_launch_template.pool["trainium"].capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "the template names the block"
  }

  assert {
    condition     = length(aws_placement_group.trainium) == 0 && aws_batch_compute_environment.pool["trainium"].compute_resources[0].placement_group == null
    error_message = "a block is placed already"
  }

  assert {
    condition     = length(aws_launch_template.pool["cpu"].instance_market_options) == 0 && length(aws_launch_template.pool["cpu"].capacity_reservation_specification) == 0
    error_message = "CPU nodes are on demand"
  }
}

run "a_reservation_in_a_placement_group" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    capacity        = { kind = "reservation", reservation_id = "cr-0123456789abcdef0" }
    placement_group = "ours"
  }

  assert {
    condition     = length(aws_placement_group.trainium) == 0 && aws_batch_compute_environment.pool["trainium"].compute_resources[0].placement_group == "ours" && length(aws_launch_template.pool["trainium"].instance_market_options) == 0
    error_message = "placement: ${jsonencode(aws_batch_compute_environment.pool["trainium"].compute_resources)}"
  }

  assert {
    condition     = aws_launch_template.pool["trainium"].capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "the template names the reservation"
  }
}

run "a_reservation_elsewhere" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    capacity = { kind = "reservation", reservation_id = "cr-0123456789abcdef0" }
  }

  assert {
    condition     = length(aws_placement_group.trainium) == 0 && aws_batch_compute_environment.pool["trainium"].compute_resources[0].placement_group == null
    error_message = "where a reservation was made only its owner knows"
  }
}

run "a_secret_for_the_tokenizer" {
  module {
    source = "../../modules/batch"
  }
  variables {
    hugging_face_secret = "arn:aws:secretsmanager:us-west-2:111122223333:secret:hugging-face-AbCdEf"
  }

  assert {
    condition     = jsondecode(aws_iam_role_policy.execution[0].policy).Statement[0].Resource == ["arn:aws:secretsmanager:us-west-2:111122223333:secret:hugging-face-AbCdEf"] && output.execution_role != null
    error_message = "one role that reads one secret: ${aws_iam_role_policy.execution[0].policy}"
  }
}

run "a_webhook_for_notices" {
  module {
    source = "../../modules/batch"
  }
  variables {
    webhook_secret = "arn:aws:secretsmanager:us-west-2:111122223333:secret:notices-AbCdEf"
  }

  assert {
    condition = jsondecode(aws_iam_role_policy.execution[0].policy).Statement == [{
      Effect   = "Allow"
      Action   = ["secretsmanager:GetSecretValue"]
      Resource = ["arn:aws:secretsmanager:us-west-2:111122223333:secret:notices-AbCdEf"]
    }]
    error_message = "one role that reads one secret: ${aws_iam_role_policy.execution[0].policy}"
  }

  assert {
    condition     = aws_iam_role.execution[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary" && output.execution_role != null
    error_message = "boundary: ${jsonencode(aws_iam_role.execution[0].permissions_boundary)}"
  }

  assert {
    condition     = keys(aws_iam_role_policy.job) == ["tokenizer"] && !strcontains(aws_iam_role_policy.job["tokenizer"].policy, "secretsmanager")
    error_message = "no job's own role reads the secret: ${jsonencode(aws_iam_role_policy.job)}"
  }
}

run "what_is_there_already" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    makes_node_group   = false
    vpc_id             = null
    security_group_ids = ["sg-given"]
    instance_profile   = "research-node"
  }

  assert {
    condition     = length(aws_iam_role.instance) == 0 && length(aws_iam_role_policy_attachment.instance) == 0 && aws_batch_compute_environment.pool["trainium"].compute_resources[0].instance_role == "arn:aws:iam::111122223333:instance-profile/research-node"
    error_message = "nodes have the role that is given"
  }

  assert {
    condition     = length(aws_security_group.nodes) == 0 && alltrue([for each in aws_launch_template.pool["trainium"].network_interfaces : each.security_groups == toset(["sg-given"])])
    error_message = "nodes are in the groups that are given"
  }
}

run "refuses_a_type_without_efa" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    trainium = {
      shape     = { name = "m7i.8xlarge", vcpus = 32, neuron_devices = 0, efa_cards = 0, huge_pages_gib = 0, supports_capacity_block = false, supports_placement_group = true }
      max_nodes = 2
      subnet_id = "subnet-trainium"
    }
  }
  expect_failures = [var.trainium]
}

run "refuses_a_placement_group_with_a_capacity_block" {
  command = plan
  module {
    source = "../../modules/batch"
  }
  variables {
    capacity        = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0" }
    placement_group = "ours"
  }
  expect_failures = [var.placement_group]
}
