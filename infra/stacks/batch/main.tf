# AWS Batch for the three stages: two queues, and nodes that Batch brings for a job and takes away after it. What is there
# all the time is NAT and the file system, where they are not given. Job definitions are not here: an image is part of one,
# so a deployment registers its own (deploy/batch/job_definition.py).

locals {
  tags = { "millrace.dev/stack" = var.name }

  account = {
    id        = data.aws_caller_identity.current.account_id
    partition = data.aws_partition.current.partition
    region    = var.region
  }

  # Names that deploy/ has too; tests/contract/test_batch_stack.py holds them together.
  repository_prefix = "millrace"
  stages            = ["tokenizer", "compiler", "trainer"]
  bucket_users      = ["tokenizer"] # the one stage that reads elsewhere than on the file system
  places            = ["REGION", "SUBNET", "SG", "ECR_REPO", "INSTANCE_ROLE", "FSX_DNS_NAME", "MOUNT_NAME"]
}

# Between a container's notice and its end, a trainer commits its checkpoint: a stop comes within a step, and may come while
# another checkpoint is being written. How long one takes follows from its size and the file system.
locals {
  checkpoints_per_notice = 3
  least_notice_seconds   = 300 # the longest of a stage whose checkpoint is small
  after_notice_seconds   = 30  # what ends after the checkpoint: Ray, and the program that starts it
  megabytes_per_second   = local.fsx.gib / 1024 * local.fsx.throughput
  checkpoint_seconds     = var.checkpoint_gb * 1000 / local.megabytes_per_second
  notice_seconds         = max(local.least_notice_seconds, ceil(local.checkpoints_per_notice * local.checkpoint_seconds))
}

# What is there already, from a config.txt: of its first seven keys each that has a value.
locals {
  lines = var.config == null ? [] : [for line in split("\n", try(file(var.config), "")) : trimspace(line)]
  config = {
    for line in local.lines : split("=", line)[0] => trimspace(join("=", slice(split("=", line), 1, length(split("=", line)))))
    if line != "" && !startswith(line, "#") && strcontains(line, "=")
  }
  broken_lines = [
    for line in local.lines : line if line != "" && !startswith(line, "#") && !can(regex("^[A-Z_]+=[!#-&(-~]*$", line))
  ]
  given = { for key in local.places : key => local.config[key] if lookup(local.config, key, "") != "" }

  given_security_groups = contains(keys(local.given), "SG") ? split(",", local.given.SG) : []
  makes_network         = !contains(keys(local.given), "SUBNET")
  makes_security_groups = length(local.given_security_groups) == 0
  makes_registry        = !contains(keys(local.given), "ECR_REPO")
  makes_file_system     = !contains(keys(local.given), "FSX_DNS_NAME")
}

# Nothing waits for this: a plan in which any of it does not hold is refused.
resource "terraform_data" "given" {
  input = local.given

  lifecycle {
    precondition {
      condition     = lookup(local.given, "REGION", var.region) == var.region
      error_message = "${coalesce(var.config, "config")}: REGION=${lookup(local.given, "REGION", "")}, and region = \"${var.region}\". What is given is of one region: set one of the two."
    }
    precondition {
      condition     = !(lookup(local.config, "NAME", "") == var.name && contains(keys(local.config), "TRAINIUM_QUEUE"))
      error_message = <<-EOT
        ${coalesce(var.config, "config")} has NAME=${var.name} and queues: this stack wrote it. Taken as what is there already, the next apply would
        destroy the network and file system that this stack made. Write those of its first seven keys that are really yours into
        another file, and name that one.
      EOT
    }
    precondition {
      condition     = contains(keys(local.given), "FSX_DNS_NAME") == contains(keys(local.given), "MOUNT_NAME")
      error_message = "${coalesce(var.config, "config")}: FSX_DNS_NAME and MOUNT_NAME belong together, and one of them is empty. Both: aws fsx describe-file-systems --query 'FileSystems[].[DNSName,LustreConfiguration.MountName]'"
    }
    precondition {
      condition     = !local.makes_network || (local.makes_security_groups && local.makes_file_system)
      error_message = "${coalesce(var.config, "config")}: SG, FSX_DNS_NAME and MOUNT_NAME are things of a VPC, and without SUBNET a new one is made that cannot use them. Write its SUBNET too, a private one with a way out (NAT)."
    }
    precondition {
      condition     = local.makes_file_system || !local.makes_security_groups
      error_message = "${coalesce(var.config, "config")}: with FSX_DNS_NAME also SG, groups that the file system lets in and that let themselves in and out for all traffic, as EFA wants it. Groups that are made now, the file system does not know."
    }
    precondition {
      condition     = length(local.given_security_groups) <= 5 && alltrue([for id in local.given_security_groups : can(regex("^sg-[0-9a-f]+$", id))])
      error_message = "${coalesce(var.config, "config")}: SG=${lookup(local.given, "SG", "")}: one to five ids of security groups, with commas and no blanks between them."
    }
    precondition {
      condition     = can(regex("^subnet-[0-9a-f]+$", lookup(local.given, "SUBNET", "subnet-0")))
      error_message = "${coalesce(var.config, "config")}: SUBNET=${lookup(local.given, "SUBNET", "")}: the id of one subnet. EFA does not cross zones, so all nodes are in one."
    }
    precondition {
      condition     = can(regex("^[0-9]{12}\\.dkr\\.ecr\\.${var.region}\\.amazonaws\\.com(\\.cn)?/[a-z0-9/_.-]+$", lookup(local.given, "ECR_REPO", "111122223333.dkr.ecr.${var.region}.amazonaws.com/millrace")))
      error_message = "${coalesce(var.config, "config")}: ECR_REPO=${lookup(local.given, "ECR_REPO", "")}: registry and prefix of this region without a stage and tag, such as 111122223333.dkr.ecr.${var.region}.amazonaws.com/millrace; images are ECR_REPO/trainer and so on."
    }
    precondition {
      condition     = can(regex("^(arn:[a-z-]+:iam::[0-9]{12}:instance-profile/)?[A-Za-z0-9+=,.@_/-]+$", lookup(local.given, "INSTANCE_ROLE", "node")))
      error_message = "${coalesce(var.config, "config")}: INSTANCE_ROLE=${lookup(local.given, "INSTANCE_ROLE", "")}: the name or ARN of an instance profile; of a role: aws iam list-instance-profiles-for-role --role-name ROLE"
    }
    precondition {
      condition     = length(local.broken_lines) == 0
      error_message = "${coalesce(var.config, "config")} has lines that are no KEY=VALUE without quotes and blanks: ${jsonencode(local.broken_lines)}."
    }
  }
}

# Instance facts, and what follows from them.
locals {
  facts   = jsondecode(file("${path.module}/../../shapes.json"))
  shapes  = local.facts.shapes
  regions = distinct(sort(flatten([for shape in local.shapes : keys(shape.zone_ids) if shape.neuron_devices > 0])))

  # Releases of the Trainium nodes' AMI, by name.
  amis = jsondecode(file("${path.module}/../../aws_releases.json")).ecs

  # The trainer's plan and infra-cost go by the same defaults.
  fsx = {
    gib        = coalesce(var.fsx.gib, local.facts.file_system.gib)
    throughput = coalesce(var.fsx.throughput, local.facts.file_system.megabytes_per_second_per_tib)
  }

  # null where validation refuses the shape.
  trainium_shape    = try(merge(local.shapes[var.trainium.shape], { name = var.trainium.shape }), null)
  trainium_zone_ids = try(local.trainium_shape.zone_ids[var.region], [])
  cpu_shape = try({
    name        = var.cpu_nodes.shape
    vcpus       = local.shapes[var.cpu_nodes.shape].vcpus
    storage_gib = local.shapes[var.cpu_nodes.shape].pod.storage_gib
  }, null)

  # The network's second zone, in which nothing is here: the first other one of the CPU nodes' type.
  zone_ids = [var.zone_id, [
    for zone_id in try(local.shapes[var.cpu_nodes.shape].zone_ids[var.region], ["${var.zone_id}-other"]) :
    zone_id if zone_id != var.zone_id
  ][0]]

  # The prefix of the Trainium subnet is three bits longer than the VPC's. AWS keeps 5 addresses of a subnet; a file server
  # takes one, and there is at most one for each 1200 GiB, beside the two that hold metadata.
  trainium_addresses = try(pow(2, 29 - tonumber(split("/", var.network.cidr)[1])), 0) - 5 - (2 + ceil(local.fsx.gib / 1200))
  own_addresses      = 2 # the node's, and its container's interface
  addresses_per_card = var.efa_layout == "efa" ? 1 : 0
  addresses_per_node = local.own_addresses + local.addresses_per_card * (try(local.trainium_shape.efa_cards, 1) - 1)
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

# One release, by its name: the "recommended" one is another every week, each of which would replace the compute environment,
# and has a newer Neuron driver than the images take.
data "aws_ami" "trainium" {
  owners             = var.ami_id == null ? ["amazon"] : null
  most_recent        = true
  include_deprecated = true

  filter {
    name   = var.ami_id == null ? "name" : "image-id"
    values = [var.ami_id == null ? local.amis.default : var.ami_id]
  }

  lifecycle {
    postcondition {
      condition     = contains(keys(local.amis.releases), self.name)
      error_message = <<-EOT
        ami_id = "${self.id}" is ${self.name}, and infra/aws_releases.json knows no Neuron driver of it. Those that it knows have a
        driver that the images take: ${join(", ", keys(local.amis.releases))}.
        Leave ami_id out for ${local.amis.default}; or look up the driver of yours (modinfo -F version neuron, on
        an instance of it), and add its name there if driver and driver_before in images/platforms.toml let it.
      EOT
    }
  }
}

data "aws_subnet" "given" {
  count = local.makes_network ? 0 : 1
  id    = local.given.SUBNET

  lifecycle {
    postcondition {
      condition     = self.availability_zone_id == var.zone_id
      error_message = "SUBNET=${self.id} is in zone ${self.availability_zone_id}, and zone_id = \"${var.zone_id}\": the nodes are where their subnet is."
    }
    postcondition {
      condition     = !self.map_public_ip_on_launch
      error_message = "SUBNET=${self.id} gives public addresses, which nodes with several interfaces and containers of a job cannot have: they would have no way out. Name a private subnet whose route leads to a NAT gateway."
    }
  }
}

module "network" {
  source                     = "../../modules/network"
  count                      = local.makes_network ? 1 : 0
  name                       = var.name
  region                     = var.region
  cidr                       = var.network.cidr
  zone_ids                   = local.zone_ids
  enable_interface_endpoints = var.enable_interface_endpoints
  endpoints_of_target        = ["ecs", "ecs-agent", "ecs-telemetry"]
  uses_default_group         = true
  permissions_boundary       = var.permissions_boundary
  flow_log                   = var.enable_flow_log ? { log_group_arn = module.storage.log_group_arns["flow"] } : null
}

# In a VPC that is given.
module "security_groups" {
  source = "../../modules/security-groups"
  count  = !local.makes_network && local.makes_security_groups ? 1 : 0
  name   = var.name
  vpc_id = data.aws_subnet.given[0].vpc_id
}

locals {
  vpc_id = local.makes_network ? module.network[0].vpc_id : data.aws_subnet.given[0].vpc_id
  subnets = {
    trainium = local.makes_network ? module.network[0].trainium_subnet.id : local.given.SUBNET
    cpu      = local.makes_network ? module.network[0].nodes_subnet_id : local.given.SUBNET
  }
  # By whose rules Lustre gets through. Given groups let themselves in and out for EFA, and so for Lustre.
  fsx_security_group_id = (
    local.makes_network ? module.network[0].fsx_security_group_id :
    local.makes_security_groups ? module.security_groups[0].fsx_id : local.given_security_groups[0]
  )
  security_group_ids = (
    local.makes_network ? [module.network[0].efa_security_group_id, module.network[0].fsx_security_group_id] :
    local.makes_security_groups ? [module.security_groups[0].efa_id, module.security_groups[0].fsx_id] :
    local.given_security_groups
  )
  file_system = {
    dns_name   = local.makes_file_system ? module.storage.fsx.dns_name : local.given.FSX_DNS_NAME
    mount_name = local.makes_file_system ? module.storage.fsx.mount_name : lookup(local.given, "MOUNT_NAME", "")
  }
  registry         = "${local.account.id}.dkr.ecr.${var.region}.${data.aws_partition.current.dns_suffix}"
  image_repository = lookup(local.given, "ECR_REPO", "${local.registry}/${local.repository_prefix}")
}

module "storage" {
  source                 = "../../modules/storage"
  name                   = var.name
  region                 = var.region
  account_id             = local.account.id
  partition              = local.account.partition
  keep_data              = var.keep_data
  log_retention_days     = var.log_retention_days
  log_groups             = { for stage in local.stages : stage => "/${var.name}/${stage}" }
  enable_data_repository = var.enable_dra
  fsx = local.makes_file_system ? {
    gib               = local.fsx.gib
    throughput        = local.fsx.throughput
    subnet_id         = local.subnets.trainium
    security_group_id = local.fsx_security_group_id
  } : null
}

module "registry" {
  source    = "../../modules/registry"
  count     = local.makes_registry ? 1 : 0
  prefix    = local.repository_prefix
  images    = toset(local.stages)
  key_arn   = module.storage.key_arn
  keep_data = var.keep_data
}

module "batch" {
  source               = "../../modules/batch"
  name                 = var.name
  account              = local.account
  key_arn              = module.storage.key_arn
  permissions_boundary = var.permissions_boundary
  trainium             = { shape = local.trainium_shape, max_nodes = var.trainium.max_nodes, subnet_id = local.subnets.trainium }
  cpu                  = { shape = local.cpu_shape, max_nodes = var.cpu_nodes.max_nodes, subnet_id = local.subnets.cpu }
  security_group_ids   = local.security_group_ids
  vpc_id               = local.makes_security_groups ? local.vpc_id : null
  makes_node_group     = local.makes_security_groups
  ready_for_nodes      = module.network[*].routes
  instance_profile     = lookup(local.given, "INSTANCE_ROLE", null)
  file_system          = local.file_system
  stages               = toset(local.stages)
  bucket_users         = toset(local.bucket_users)
  bucket_arn           = module.storage.bucket.arn
  hugging_face_secret  = var.hugging_face_secret
  stop_seconds         = local.notice_seconds + local.after_notice_seconds
  queue_limits         = var.queue_limits
  efa_layout           = var.efa_layout
  capacity             = { kind = var.capacity.kind, reservation_id = var.capacity.reservation_id }
  placement_group      = var.placement_group
  ami_id               = data.aws_ami.trainium.id
  tags                 = local.tags
}

module "guardrails" {
  source               = "../../modules/guardrails"
  name                 = var.name
  account              = local.account
  key_arn              = module.storage.key_arn
  permissions_boundary = var.permissions_boundary
  budget               = var.budget.monthly_dollars == null ? null : { monthly_dollars = var.budget.monthly_dollars }
  emails               = var.budget.emails
  stopped_roles = [
    # IAM lets nobody attach a policy to a role of Identity Center or of a service.
    for arn in var.operators : { name = basename(arn), arn = arn }
    if strcontains(arn, ":${local.account.id}:role/") && length(regexall(":role/aws-(reserved|service-role)/", arn)) == 0
  ]
  denied_actions = ["batch:SubmitJob", "batch:CreateComputeEnvironment", "batch:UpdateComputeEnvironment"]
  # Batch takes nodes away when no job is left, and a job has a time limit. No metric of ECS tells of NeuronCores.
  trainium_autoscaling_group = null
  trainium_max_nodes         = var.trainium.max_nodes
  zero_schedule              = null
  idle_alarm                 = null
}
