# AWS Batch for the three stages: two queues, whose nodes Batch starts for a job and terminates after it. The NAT gateway and
# the file system are always up, unless config names existing ones. Job definitions are not here: a job definition names an
# image, so each deployment registers its own (deploy/batch/job_definition.py).

locals {
  # deploy/ has these names too; tests/contract/test_batch_stack.py compares them.
  stages = ["tokenizer", "compiler", "trainer"]
  places = ["REGION", "SUBNET", "SG", "ECR_REPO", "INSTANCE_ROLE", "FSX_DNS_NAME", "MOUNT_NAME"]

  # common.tf checks these.
  cpu_shapes    = [var.cpu_nodes.shape]
  own_addresses = 2 # the node's own, and its container's interface

  # null where a validation refuses the shape.
  cpu_shape = try({
    name        = var.cpu_nodes.shape
    vcpus       = local.shapes[var.cpu_nodes.shape].vcpus
    storage_gib = local.shapes[var.cpu_nodes.shape].pod.storage_gib
  }, null)

  # Names of the Trainium nodes' AMIs with a Neuron driver for trn1 or trn2.
  amis        = jsondecode(file("${path.module}/../../aws_releases.json")).ecs
  generation  = substr(var.trainium.shape, 0, 4)
  ami_names   = keys(lookup(local.amis.releases, local.generation, {}))
  default_ami = lookup(local.amis.defaults, local.generation, "none")
}

# In a container's grace period a trainer commits a checkpoint, perhaps after one that is being written and the
# step that is running. The checkpoint's size and the file system decide how long that takes.
locals {
  checkpoints_per_notice = 3
  least_notice_seconds   = 300 # the longest drain of a stage with a small checkpoint
  after_notice_seconds   = 30  # for Ray and the launcher, which end after the checkpoint
  megabytes_per_second   = local.fsx.gib / 1024 * local.fsx.throughput
  checkpoint_seconds     = var.checkpoint_gb * 1000 / local.megabytes_per_second
  notice_seconds         = max(local.least_notice_seconds, ceil(local.checkpoints_per_notice * local.checkpoint_seconds))
}

# Resources that exist already: each of the first seven keys of config.txt that has a value.
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

# A plan in which one of these preconditions does not hold is refused. No other resource depends on them.
resource "terraform_data" "given" {
  input = local.given

  lifecycle {
    precondition {
      condition     = lookup(local.given, "REGION", var.region) == var.region
      error_message = "${coalesce(var.config, "config")}: REGION=${lookup(local.given, "REGION", "")}, and region = \"${var.region}\". Existing resources have to be in the stack's region; change one of the two."
    }
    precondition {
      condition     = !(lookup(local.config, "NAME", "") == var.name && contains(keys(local.config), "TRAINIUM_QUEUE"))
      error_message = <<-EOT
        ${coalesce(var.config, "config")} has NAME=${var.name} and queues, so this stack wrote it. The next apply would take the stack's own network and
        file system for existing resources and destroy them. Copy those of its first seven keys that are really yours into
        another file, and name that one.
      EOT
    }
    precondition {
      condition     = contains(keys(local.given), "FSX_DNS_NAME") == contains(keys(local.given), "MOUNT_NAME")
      error_message = "${coalesce(var.config, "config")}: FSX_DNS_NAME and MOUNT_NAME belong together, and one of them is empty. This command shows both: aws fsx describe-file-systems --query 'FileSystems[].[DNSName,LustreConfiguration.MountName]'"
    }
    precondition {
      condition     = !local.makes_network || (local.makes_security_groups && local.makes_file_system)
      error_message = "${coalesce(var.config, "config")}: SG, FSX_DNS_NAME and MOUNT_NAME belong to a VPC, and without SUBNET the stack makes a new VPC that cannot use them. Add SUBNET, a private subnet of that VPC with a route to a NAT gateway."
    }
    precondition {
      condition     = local.makes_file_system || !local.makes_security_groups
      error_message = "${coalesce(var.config, "config")}: FSX_DNS_NAME needs SG: security groups that the file system admits, and that allow all traffic from and to themselves, as EFA requires. The file system would not admit new groups."
    }
    precondition {
      condition     = length(local.given_security_groups) <= 5 && alltrue([for id in local.given_security_groups : can(regex("^sg-[0-9a-f]+$", id))])
      error_message = "${coalesce(var.config, "config")}: SG=${lookup(local.given, "SG", "")}: expected one to five ids of security groups, separated by commas without blanks."
    }
    precondition {
      condition     = can(regex("^subnet-[0-9a-f]+$", lookup(local.given, "SUBNET", "subnet-0")))
      error_message = "${coalesce(var.config, "config")}: SUBNET=${lookup(local.given, "SUBNET", "")}: expected the id of one subnet. EFA does not cross zones, so all nodes are in one subnet."
    }
    precondition {
      condition     = can(regex("^[0-9]{12}\\.dkr\\.ecr\\.${var.region}\\.amazonaws\\.com(\\.cn)?/[a-z0-9/_.-]+$", lookup(local.given, "ECR_REPO", "111122223333.dkr.ecr.${var.region}.amazonaws.com/millrace")))
      error_message = "${coalesce(var.config, "config")}: ECR_REPO=${lookup(local.given, "ECR_REPO", "")}: expected a registry of this region and a prefix without stage and tag, such as 111122223333.dkr.ecr.${var.region}.amazonaws.com/millrace. The trainer's image is ECR_REPO/trainer."
    }
    precondition {
      condition     = can(regex("^(arn:[a-z-]+:iam::[0-9]{12}:instance-profile/)?[A-Za-z0-9+=,.@_/-]+$", lookup(local.given, "INSTANCE_ROLE", "node")))
      error_message = "${coalesce(var.config, "config")}: INSTANCE_ROLE=${lookup(local.given, "INSTANCE_ROLE", "")}: expected the name or ARN of an instance profile. This command shows those of a role: aws iam list-instance-profiles-for-role --role-name ROLE"
    }
    precondition {
      condition     = length(local.broken_lines) == 0
      error_message = "${coalesce(var.config, "config")} has lines that are not KEY=VALUE without quotes and blanks: ${jsonencode(local.broken_lines)}."
    }
  }
}

# One release by its name. The "recommended" release changes every week, which would replace the compute environment each
# time, and its Neuron driver may be one that the images do not accept.
data "aws_ami" "trainium" {
  owners             = var.ami_id == null ? ["amazon"] : null
  most_recent        = true
  include_deprecated = true

  filter {
    name   = var.ami_id == null ? "name" : "image-id"
    values = [var.ami_id == null ? local.default_ami : var.ami_id]
  }

  lifecycle {
    postcondition {
      condition     = contains(local.ami_names, self.name)
      error_message = <<-EOT
        ami_id = "${self.id}" is ${self.name}, whose Neuron driver infra/aws_releases.json does not list. It lists
        for ${var.trainium.shape}: ${join(", ", local.ami_names)}.
        images/platforms.toml has the drivers that the images accept. Choose an AMI with one of them; if that is
        yours, look up its driver (modinfo -F version neuron on an instance), and add its name to the table.
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
      error_message = "SUBNET=${self.id} is in zone ${self.availability_zone_id}, and zone_id = \"${var.zone_id}\". Set zone_id to the zone of the subnet."
    }
    postcondition {
      condition     = pow(2, 32 - tonumber(split("/", self.cidr_block)[1])) - 5 >= var.trainium.max_nodes * local.addresses_per_node
      error_message = "SUBNET=${self.id} is ${self.cidr_block}, of which AWS keeps 5 addresses, and ${var.trainium.max_nodes} Trainium nodes take ${local.addresses_per_node} each. Name a larger subnet, lower trainium.max_nodes, or set efa_layout to \"efa-only\"."
    }
    postcondition {
      condition     = !self.map_public_ip_on_launch
      error_message = "SUBNET=${self.id} assigns public addresses, which nodes with several interfaces and the containers of a job cannot have, so that they would not reach the internet. Name a private subnet with a route to a NAT gateway."
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

# Security groups in an existing VPC.
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
  # The security group of the file system. Existing groups allow all traffic from and to themselves for EFA, and so Lustre.
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
  permissions_boundary   = var.permissions_boundary
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
  webhook_secret       = var.webhook_secret
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
  budget               = local.budget
  emails               = var.budget.emails
  stopped_roles        = local.stoppable_operators
  denied_actions       = ["batch:SubmitJob", "batch:CreateComputeEnvironment", "batch:UpdateComputeEnvironment"]
  # Batch terminates nodes once no job is left, and each job has a time limit. ECS has no metric of NeuronCores.
  trainium_autoscaling_group = null
  trainium_max_nodes         = var.trainium.max_nodes
  zero_schedule              = null
  idle_alarm                 = null
  job_queue_arns             = values(module.batch.queue_arns)
}
