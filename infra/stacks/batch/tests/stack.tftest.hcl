# The whole stack, planned or applied against a provider that is none: no network, no credentials.

mock_provider "aws" {
  source = "../mocks"

  mock_resource "aws_security_group" {
    defaults = { id = "sg-0123456789abcdef0" }
  }
}

variables {
  region  = "us-west-2"
  zone_id = "usw2-az4"
}

run "what_two_lines_of_tfvars_give" {
  # Applied, because outputs are what is asked.

  assert {
    condition = output.config == join("", [for line in [
      "REGION=us-west-2",
      "SUBNET=subnet-0123456789abcdef0",
      "SG=sg-0123456789abcdef0,sg-0123456789abcdef0,sg-0123456789abcdef0",
      "ECR_REPO=111122223333.dkr.ecr.us-west-2.amazonaws.com/millrace",
      "INSTANCE_ROLE=arn:aws:iam::111122223333:instance-profile/mock",
      "FSX_DNS_NAME=fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
      "MOUNT_NAME=mockmnt",
      "NAME=millrace",
      "TRAINIUM_QUEUE=millrace-trainium",
      "TRAINIUM_SHAPE=trn1.32xlarge",
      "TRAINIUM_MAX_NODES=4",
      "CPU_QUEUE=millrace-cpu",
      "CPU_SHAPE=m7i.8xlarge",
      "CPU_MAX_NODES=4",
      "LOG_GROUP_TOKENIZER=/millrace/tokenizer",
      "LOG_GROUP_COMPILER=/millrace/compiler",
      "LOG_GROUP_TRAINER=/millrace/trainer",
      "JOB_ROLE_TOKENIZER=arn:aws:iam::111122223333:role/mock",
      "JOB_ROLE_COMPILER=arn:aws:iam::111122223333:role/mock",
      "JOB_ROLE_TRAINER=arn:aws:iam::111122223333:role/mock",
      "CAPACITY_ENDS_AT=",
      "CHECKPOINT_GB=157",
      "NOTICE_SECONDS=402",
      "HF_TOKEN_SECRET=",
      "WEBHOOK_SECRET=",
      "EXECUTION_ROLE=",
    ] : "${line}\n"])
    error_message = "config.txt:\n${output.config}"
  }

  assert {
    condition     = local.tags == { "millrace.dev/stack" = "millrace" }
    error_message = "tags of a stack that several runs share: ${jsonencode(local.tags)}"
  }

  assert {
    condition     = output.repositories == tomap({ tokenizer = "millrace/tokenizer", compiler = "millrace/compiler", trainer = "millrace/trainer" })
    error_message = "repositories: ${jsonencode(output.repositories)}"
  }

  assert {
    condition     = output.addresses_per_node == 9
    error_message = "addresses: ${output.addresses_per_node}"
  }

  assert {
    condition     = length(module.guardrails.stopped_roles) == 0
    error_message = "no sum, no budget: ${jsonencode(module.guardrails.stopped_roles)}"
  }

  assert {
    condition     = length(module.security_groups) == 0 && length(data.aws_subnet.given) == 0 && module.network[0].trainium_subnet.zone_id == "usw2-az4"
    error_message = "a VPC of its own in the zone of the nodes"
  }

  assert {
    condition = [for each in data.aws_ami.trainium.filter : [each.name, each.values]] == [
      ["name", toset(["al2023-ami-ecs-neuron-hvm-2023.0.20260506-kernel-6.1-x86_64"])]
    ] && data.aws_ami.trainium.owners == tolist(["amazon"])
    error_message = "one release by its name, and not the newest: ${jsonencode(data.aws_ami.trainium.filter)}"
  }

  # 1200 GiB of 250 MB/s a TiB write 157 GB in 536 s.
  assert {
    condition     = strcontains(module.batch.user_data.trainium, "ECS_CONTAINER_STOP_TIMEOUT=432s") && strcontains(module.batch.user_data.cpu, "ECS_CONTAINER_STOP_TIMEOUT=432s")
    error_message = "three checkpoints, and 30 s: ${module.batch.user_data.trainium}"
  }
}

run "a_small_checkpoint_on_a_fast_file_system" {
  variables {
    checkpoint_gb = 1
    fsx           = { gib = 2400, throughput = 1000 }
  }

  assert {
    condition     = strcontains(output.config, "CHECKPOINT_GB=1\nNOTICE_SECONDS=300\n") && strcontains(module.batch.user_data.trainium, "ECS_CONTAINER_STOP_TIMEOUT=330s")
    error_message = "never less than the longest notice of a stage:\n${output.config}"
  }
}

run "a_large_checkpoint_on_a_given_file_system" {
  variables {
    config        = "tests/configs/given.txt"
    checkpoint_gb = 850
    fsx           = { gib = 4800, throughput = 500 }
  }

  # 850 GB at 2,344 MB/s take 363 s.
  assert {
    condition     = strcontains(output.config, "CHECKPOINT_GB=850\nNOTICE_SECONDS=1088\n")
    error_message = "config.txt:\n${output.config}"
  }
}

run "all_that_is_there_already" {
  variables {
    config = "tests/configs/given.txt"
  }

  assert {
    condition = startswith(output.config, join("", [for line in [
      "REGION=us-west-2",
      "SUBNET=subnet-0fedcba9876543210",
      "SG=sg-0aaaaaaaaaaaaaaa0,sg-0bbbbbbbbbbbbbbb0",
      "ECR_REPO=111122223333.dkr.ecr.us-west-2.amazonaws.com/research",
      "INSTANCE_ROLE=arn:aws:iam::111122223333:instance-profile/research-node",
      "FSX_DNS_NAME=fs-0fedcba9876543210.fsx.us-west-2.amazonaws.com",
      "MOUNT_NAME=givenmnt",
      "NAME=millrace",
    ] : "${line}\n"]))
    error_message = "config.txt:\n${output.config}"
  }

  assert {
    condition     = length(module.network) == 0 && length(module.security_groups) == 0 && length(module.registry) == 0 && output.fsx_id == "" && output.repositories == {}
    error_message = "nothing is made that is there"
  }

  assert {
    condition     = strcontains(module.batch.user_data.trainium, "source=fs-0fedcba9876543210.fsx.us-west-2.amazonaws.com@tcp:/givenmnt")
    error_message = "nodes mount the file system that is there"
  }
}

run "a_subnet_that_is_there" {
  variables {
    config = "tests/configs/subnet.txt"
  }

  assert {
    condition     = length(module.network) == 0 && length(module.security_groups) == 1 && output.fsx_id == "fs-0123456789abcdef0"
    error_message = "groups and the file system are made in its VPC"
  }

  assert {
    condition     = local.vpc_id == "vpc-given" && strcontains(output.config, "SUBNET=subnet-0fedcba9876543210\n")
    error_message = "config.txt:\n${output.config}"
  }
}

run "the_longest_name_in_the_longest_region" {
  variables {
    region  = "ap-southeast-2"
    zone_id = "apse2-az1"
    name    = "a-name-of-twenty-four-ab"
  }

  assert {
    condition     = output.queues.trainium == "a-name-of-twenty-four-ab-trainium"
    error_message = "name: ${output.queues.trainium}"
  }
}

run "operators_whom_a_spent_budget_stops" {
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
    condition     = toset(module.guardrails.stopped_roles) == toset(["research"])
    error_message = "stopped: ${jsonencode(module.guardrails.stopped_roles)}"
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
    permissions_boundary       = null
    emails                     = []
    stopped_roles              = []
    denied_actions             = ["batch:SubmitJob"]
    trainium_autoscaling_group = null
    trainium_max_nodes         = 4
    zero_schedule              = null
    idle_alarm                 = null
    job_queue_arns             = ["arn:aws:batch:us-west-2:111122223333:job-queue/millrace-cpu"]
  }

  assert {
    condition = {
      for key, rule in aws_cloudwatch_event_rule.job : key => jsondecode(rule.event_pattern).detail
      } == {
      for key, status in { started = "RUNNING", done = "SUCCEEDED", ended = "FAILED" } :
      key => { status = [status], jobQueue = ["arn:aws:batch:us-west-2:111122223333:job-queue/millrace-cpu"] }
    }
    error_message = "one notice for each begin and end of a job of these queues: ${jsonencode(aws_cloudwatch_event_rule.job)}"
  }

  assert {
    condition = alltrue([
      for target in aws_cloudwatch_event_target.job : target.arn == aws_sns_topic.this.arn && strcontains(target.input_transformer[0].input_template, "<reason>")
    ])
    error_message = "the topic gets what Batch says: ${jsonencode(aws_cloudwatch_event_target.job)}"
  }

  assert {
    condition = [
      for statement in jsondecode(aws_sns_topic_policy.this.policy).Statement : statement.Condition.ArnEquals["aws:SourceArn"]
      if contains(statement.Principal.Service, "events.amazonaws.com")
    ] == [for rule in aws_cloudwatch_event_rule.job : rule.arn]
    error_message = "EventBridge publishes for these rules alone: ${aws_sns_topic_policy.this.policy}"
  }

  assert {
    condition     = jsondecode(aws_iam_policy.stop[0].policy).Statement[0].Action == ["batch:SubmitJob"] && jsondecode(aws_iam_policy.stop[0].policy).Statement[0].Effect == "Deny"
    error_message = "no jobs over the budget: ${aws_iam_policy.stop[0].policy}"
  }

  assert {
    condition     = length(aws_autoscaling_schedule.zero) == 0 && length(aws_cloudwatch_metric_alarm.idle) == 0
    error_message = "Batch has no group of nodes to lower, and ECS no metric of NeuronCores"
  }
}

run "another_shape_in_another_region_is_three_lines" {
  command = plan
  variables {
    region   = "us-east-2"
    zone_id  = "use2-az3"
    trainium = { shape = "trn2.48xlarge", max_nodes = 2 }
  }
  override_data {
    target = data.aws_ami.trainium
    values = { id = "ami-0123456789abcdef0", name = "al2023-ami-ecs-neuron-hvm-2023.0.20261113-kernel-6.1-x86_64" }
  }

  assert {
    condition     = module.network[0].trainium_subnet.zone_id == "use2-az3" && output.addresses_per_node == 17
    error_message = "zone: ${module.network[0].trainium_subnet.zone_id}"
  }
}

run "an_ultraserver" {
  command = plan
  variables {
    region   = "ap-south-2"
    zone_id  = "aps2-az1"
    trainium = { shape = "trn2u.48xlarge", max_nodes = 4 }
  }
  override_data {
    target = data.aws_ami.trainium
    values = { id = "ami-0123456789abcdef0", name = "al2023-ami-ecs-neuron-hvm-2023.0.20261113-kernel-6.1-x86_64" }
  }

  assert {
    condition     = module.network[0].trainium_subnet.zone_id == "aps2-az1" && output.addresses_per_node == 17
    error_message = "zone: ${module.network[0].trainium_subnet.zone_id}, addresses: ${output.addresses_per_node}"
  }
}

run "a_capacity_block" {
  variables {
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0", ends_at = "2027-01-31T11:30:00Z" }
  }

  assert {
    condition     = strcontains(output.config, "CAPACITY_ENDS_AT=2027-01-31T11:30:00Z\n") && output.capacity_ends_at == "2027-01-31T11:30:00Z"
    error_message = "config.txt:\n${output.config}"
  }
}

run "a_secret" {
  variables {
    hugging_face_secret = "arn:aws:secretsmanager:us-west-2:111122223333:secret:hugging-face-AbCdEf"
  }

  assert {
    condition     = strcontains(output.config, "HF_TOKEN_SECRET=arn:aws:secretsmanager:us-west-2:111122223333:secret:hugging-face-AbCdEf\nWEBHOOK_SECRET=\nEXECUTION_ROLE=arn:aws:iam::111122223333:role/mock\n")
    error_message = "config.txt:\n${output.config}"
  }
}

run "a_webhook_for_notices" {
  variables {
    webhook_secret = "arn:aws:secretsmanager:us-west-2:111122223333:secret:notices-AbCdEf"
  }

  assert {
    condition     = strcontains(output.config, "HF_TOKEN_SECRET=\nWEBHOOK_SECRET=arn:aws:secretsmanager:us-west-2:111122223333:secret:notices-AbCdEf\nEXECUTION_ROLE=arn:aws:iam::111122223333:role/mock\n")
    error_message = "config.txt:\n${output.config}"
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
    operators                  = ["arn:aws:iam::111122223333:role/research"]
    budget                     = { monthly_dollars = 5000, emails = ["you@example.com"] }
    ami_id                     = "ami-0fedcba9876543210"
    efa_layout                 = "efa-only"
    network                    = { cidr = "10.9.0.0/22" }
    keep_data                  = false
  }

  assert {
    condition     = data.aws_ami.trainium.owners == null && output.addresses_per_node == 2
    error_message = "an AMI that is named may be of anybody: ${jsonencode(data.aws_ami.trainium.owners)}"
  }
}

run "with_nothing_optional" {
  variables {
    enable_dra      = false
    enable_flow_log = false
    placement_group = "none"
  }

  assert {
    condition     = output.fsx_id == "fs-0123456789abcdef0"
    error_message = output.fsx_id
  }
}
