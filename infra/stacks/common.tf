# The variables and facts that both stacks share. stacks/eks/common.tf and stacks/batch/common.tf are symbolic links to
# this file, because Terraform can share a module and no variables.
#
# For another region or instance type, change region, zone_id and trainium.shape in terraform.tfvars, nothing else.
# infra/shapes.json says what an instance type has and which zones offer it. make infra-up refuses a type for as
# long as images/platforms.toml names no image that computes on it, or infra/aws_releases.json no driver that fits those.

variable "region" {
  description = "The AWS region, which infra/shapes.json has to list."
  type        = string

  validation {
    condition     = contains(local.regions, var.region)
    error_message = <<-EOT
      region = "${var.region}": infra/shapes.json lists no Trainium there. It lists ${join(", ", local.regions)}.
      If AWS offers Trainium in another region by now, add its zone ids to the shape's zone_ids.
    EOT
  }
}

variable "name" {
  description = "Name of the stack and of the EKS cluster, with which the names of all resources begin. A region holds one stack: the ECR repositories are millrace/... whatever the name is."
  type        = string
  default     = "millrace"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,22}[a-z0-9]$", var.name))
    error_message = "name = \"${var.name}\": expected 3 to 24 lower-case letters, digits and hyphens that begin with a letter. Roles and the bucket append the account and the region."
  }
}

variable "run" {
  description = "Name of the run, or of its recipe, for which the stack is made: the tag millrace.dev/run of all resources, volumes, node groups and nodes. Empty for a stack that several runs share; their jobs and pods carry the tag themselves. A change replaces the nodes."
  type        = string
  default     = ""

  validation {
    condition     = can(regex("^([a-z0-9][a-z0-9._-]{0,136})?$", var.run))
    error_message = "run = \"${var.run}\": expected the name of a run or of a recipe: lower-case letters, digits, dots, underscores and hyphens."
  }
}

variable "zone_id" {
  description = "Id of the availability zone of all nodes. The names of zones differ between accounts, their ids do not."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+[0-9]-az[0-9]+$", var.zone_id))
    error_message = <<-EOT
      zone_id = "${var.zone_id}" is not the id of one zone. Ids look like usw2-az4. us-west-2d is a name, and stands for
      another zone in another account. This command lists the ids and names of your account:
        aws ec2 describe-availability-zones --region ${var.region} --query 'AvailabilityZones[].[ZoneId,ZoneName]'
    EOT
  }

  validation {
    condition     = contains(local.trainium_zone_ids, var.zone_id) || !contains(keys(local.shapes), var.trainium.shape)
    error_message = <<-EOT
      zone_id = "${var.zone_id}": EC2 does not offer ${var.trainium.shape} there.
      In ${var.region} it offers it in: ${join(", ", local.trainium_zone_ids)}${length(local.trainium_zone_ids) == 0 ? "no zone; choose another region or shape" : ""}.
      This command shows whether that has changed; if it has, add the zone to infra/shapes.json:
        aws ec2 describe-instance-type-offerings --region ${var.region} --location-type availability-zone-id --filters Name=instance-type,Values=${var.trainium.shape}
    EOT
  }

  validation {
    condition = alltrue([
      for shape in local.cpu_shapes :
      contains(try(local.shapes[shape].zone_ids[var.region], []), var.zone_id) || !contains(keys(local.shapes), shape)
    ])
    error_message = "zone_id = \"${var.zone_id}\" does not offer all of ${join(", ", local.cpu_shapes)}, and all nodes are in one zone. Choose other instance types, or another zone_id."
  }
}

variable "trainium" {
  description = "Instance type of the Trainium nodes, and the most of them at a time. There are none until a deployment needs them."
  type = object({
    shape     = optional(string, "trn1.32xlarge")
    max_nodes = optional(number, 4)
  })
  default = {}

  validation {
    condition     = try(local.shapes[var.trainium.shape].efa_cards > 0 && local.shapes[var.trainium.shape].neuron_devices > 0, false)
    error_message = "trainium.shape = \"${var.trainium.shape}\" is no Trainium type with EFA of infra/shapes.json, which has ${join(", ", [for name, shape in local.shapes : name if shape.neuron_devices > 0])}. Add another type there. Its types with GPUs serve the trainer's plan only."
  }

  validation {
    condition     = var.trainium.max_nodes >= 1 && floor(var.trainium.max_nodes) == var.trainium.max_nodes
    error_message = "trainium.max_nodes = ${var.trainium.max_nodes}: expected a whole number of 1 or more. 1 costs nothing until a deployment needs the node."
  }

  # The formula is written out, because a validation may not use a local that depends on its own variable.
  validation {
    condition = try(
      !local.makes_network || var.trainium.max_nodes * (local.own_addresses + local.addresses_per_card * (local.shapes[var.trainium.shape].efa_cards - 1)) <= local.trainium_addresses,
      true, # the first validation refuses an unknown shape
    )
    error_message = <<-EOT
      trainium.max_nodes = ${var.trainium.max_nodes}: the Trainium subnet of network.cidr = ${var.network.cidr} has ${local.trainium_addresses} addresses for nodes, and
      a node takes ${local.own_addresses + try(local.addresses_per_card * (local.shapes[var.trainium.shape].efa_cards - 1), 0)}: ${local.own_addresses} for itself and its pods or containers, and ${local.addresses_per_card} for each further EFA interface.
      Set network.cidr to a larger block (a shorter prefix), or efa_layout to "efa-only", which needs no address for those.
    EOT
  }
}

variable "cpu_nodes" {
  description = "Instance type of the nodes of the tokenizer and the compiler, and the most of them at a time. There are none until a deployment needs them."
  type = object({
    shape     = optional(string, "m7i.8xlarge")
    max_nodes = optional(number, 4)
  })
  default = {}

  validation {
    condition     = try(local.shapes[var.cpu_nodes.shape].neuron_devices == 0 && local.shapes[var.cpu_nodes.shape].gpus == 0 && local.shapes[var.cpu_nodes.shape].pod != null, false)
    error_message = "cpu_nodes.shape = \"${var.cpu_nodes.shape}\": expected a type of infra/shapes.json without Neuron devices and GPUs that is large enough for a stage: ${join(", ", [for name, shape in local.shapes : name if shape.neuron_devices == 0 && shape.gpus == 0 && shape.pod != null])}."
  }

  validation {
    condition     = var.cpu_nodes.max_nodes >= 1 && floor(var.cpu_nodes.max_nodes) == var.cpu_nodes.max_nodes
    error_message = "cpu_nodes.max_nodes = ${var.cpu_nodes.max_nodes}: expected a whole number of 1 or more."
  }
}

variable "capacity" {
  description = "How Trainium nodes are bought: on_demand, reservation (an On-Demand Capacity Reservation) or capacity_block. The latter two need a reservation_id, and ends_at (RFC 3339) where they end."
  type = object({
    kind           = optional(string, "on_demand")
    reservation_id = optional(string, "")
    ends_at        = optional(string, "")
  })
  default = {}

  validation {
    condition     = contains(["on_demand", "reservation", "capacity_block"], var.capacity.kind)
    error_message = "capacity.kind = \"${var.capacity.kind}\": expected on_demand, reservation or capacity_block."
  }

  validation {
    condition     = var.capacity.kind == "on_demand" || can(regex("^cr-[0-9a-f]+$", var.capacity.reservation_id))
    error_message = <<-EOT
      capacity.kind = "${var.capacity.kind}" needs the reservation's id, cr- and hexadecimal digits; got "${var.capacity.reservation_id}". This command lists yours:
        aws ec2 describe-capacity-reservations --region ${var.region} --filters Name=instance-type,Values=${var.trainium.shape}
    EOT
  }

  validation {
    condition     = var.capacity.kind != "on_demand" || (var.capacity.reservation_id == "" && var.capacity.ends_at == "")
    error_message = "capacity.kind = \"on_demand\" takes no reservation_id and no ends_at: the reservation would be paid for and not used. Set kind to reservation or capacity_block."
  }

  validation {
    condition     = var.capacity.kind != "capacity_block" || try(local.trainium_shape.supports_capacity_block, true)
    error_message = "capacity.kind = \"capacity_block\": EC2 sells no Capacity Blocks of ${var.trainium.shape}. Choose on_demand or reservation."
  }

  validation {
    condition     = var.capacity.ends_at == "" ? var.capacity.kind != "capacity_block" : can(timeadd(var.capacity.ends_at, "0s"))
    error_message = <<-EOT
      capacity.ends_at = "${var.capacity.ends_at}": expected a time such as 2027-01-31T11:30:00Z. Every Capacity Block has one (EndDate of
      describe-capacity-reservations). EC2 ends its instances 30 minutes earlier and EKS its nodes 40 minutes earlier,
      which the deploy tool takes into account.
    EOT
  }
}

variable "placement_group" {
  description = "Cluster placement group of the Trainium nodes. auto makes one for nodes on demand, none makes none, and any other value is the name of the group in which a reservation was made."
  type        = string
  default     = "auto"

  validation {
    condition     = var.capacity.kind != "capacity_block" || contains(["auto", "none"], var.placement_group)
    error_message = <<-EOT
      placement_group = "${var.placement_group}" with a Capacity Block: EC2 has already placed the block's instances close to each
      other, and answers InsufficientInstanceCapacity to any other placement. Set placement_group to "auto".
    EOT
  }
}

variable "efa_layout" {
  description = "With efa every interface has an IP address, as Neuron documents it for trn1. With efa-only only the first interface has one."
  type        = string
  default     = "efa"

  validation {
    condition     = contains(["efa", "efa-only"], var.efa_layout)
    error_message = "efa_layout = \"${var.efa_layout}\": expected efa or efa-only."
  }
}

variable "network" {
  description = "IPv4 block of the VPC that the stack makes. The subnet of the Trainium nodes is an eighth of it."
  type        = object({ cidr = optional(string, "10.0.0.0/16") })
  default     = {}

  validation {
    condition     = can(cidrnetmask(var.network.cidr)) && try(tonumber(split("/", var.network.cidr)[1]) >= 16 && tonumber(split("/", var.network.cidr)[1]) <= 22, false)
    error_message = "network.cidr = \"${var.network.cidr}\": expected an IPv4 block of /16 to /22, such as 10.0.0.0/16."
  }
}

variable "fsx" {
  description = "Size of the file system in GiB and its throughput in MB/s per TiB; file_system in infra/shapes.json has the defaults. They decide how long a checkpoint takes (make infra-cost shows it), and on Batch also the stop timeout: for a file system that config names, write its own values. The throughput can be changed in place."
  type = object({
    gib        = optional(number)
    throughput = optional(number)
  })
  default = {}

  validation {
    condition     = var.fsx.gib == null ? true : var.fsx.gib == 1200 || (var.fsx.gib > 0 && var.fsx.gib % 2400 == 0)
    error_message = "fsx.gib = ${coalesce(var.fsx.gib, 0)}: PERSISTENT_2 comes in 1200 GiB, 2400 GiB, and steps of 2400 GiB from there."
  }

  validation {
    condition     = var.fsx.throughput == null ? true : contains([125, 250, 500, 1000], var.fsx.throughput)
    error_message = "fsx.throughput = ${coalesce(var.fsx.throughput, 0)}: expected 125, 250, 500 or 1000 MB/s per TiB."
  }
}

variable "budget" {
  description = "Monthly budget of the whole account, and the addresses that get its mails. Without monthly_dollars there is no budget: once 100 % is spent, deployments get no nodes until somebody resets the budget's action, and no default could know what else the account pays for."
  type = object({
    monthly_dollars = optional(number)
    emails          = optional(list(string), [])
  })
  default = {}

  validation {
    condition     = var.budget.monthly_dollars == null ? true : var.budget.monthly_dollars > 0
    error_message = "budget.monthly_dollars = ${coalesce(var.budget.monthly_dollars, 0)}: expected more than 0, and more than the stack costs with nothing running (make infra-up DRY_RUN=1 shows that). Leave it out to have no budget."
  }

  validation {
    condition     = alltrue([for address in var.budget.emails : can(regex("^[^@ ]+@[^@ ]+\\.[^@ ]+$", address))])
    error_message = "budget.emails = ${jsonencode(var.budget.emails)}: expected mail addresses."
  }
}

variable "operators" {
  description = "ARNs of the IAM roles and users that deploy stages. Once the budget is spent, its action denies the roles among them new nodes."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.operators : can(regex("^arn:[a-z-]+:iam::[0-9]{12}:(role|user)/", arn))])
    error_message = "operators = ${jsonencode(var.operators)}: expected ARNs of roles or users, such as arn:aws:iam::111122223333:role/research. For a session, name the role behind it."
  }
}

variable "permissions_boundary" {
  description = "ARN of an IAM policy that bounds every role of the stack, which some organisations require; null for none."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary == null ? true : can(regex("^arn:[a-z-]+:iam::([0-9]{12}|aws):policy/", var.permissions_boundary))
    error_message = "permissions_boundary = \"${coalesce(var.permissions_boundary, "-")}\": expected the ARN of a policy, such as arn:aws:iam::111122223333:policy/boundary."
  }
}

variable "keep_data" {
  description = "Whether Terraform refuses to destroy a bucket or a repository that is not empty."
  type        = bool
  default     = true
}

variable "log_retention_days" {
  description = "Days for which CloudWatch keeps the stack's logs."
  type        = number
  default     = 90

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "log_retention_days = ${var.log_retention_days}: CloudWatch keeps logs for 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545 or 731 days."
  }
}

variable "aws_endpoint" {
  description = "Address of the simulated AWS of a test; null for AWS itself."
  type        = string
  default     = null
}

variable "enable_interface_endpoints" {
  description = "Whether nodes reach the AWS APIs through ten interface endpoints, billed by the hour, which saves the NAT gateway's charge for that traffic. The NAT gateway stays."
  type        = bool
  default     = false
}

variable "enable_dra" {
  description = "Whether data repository associations copy checkpoints, and every hour the records of runs, from the file system to the bucket."
  type        = bool
  default     = true
}

variable "enable_flow_log" {
  description = "Whether a flow log records the traffic that the VPC's security groups reject."
  type        = bool
  default     = true
}

locals {
  tags = merge({ "millrace.dev/stack" = var.name }, var.run == "" ? {} : { "millrace.dev/run" = var.run })

  account = {
    id        = data.aws_caller_identity.current.account_id
    partition = data.aws_partition.current.partition
    region    = var.region
  }

  # deploy/ has the prefix and the bucket's users too; tests/contract compares them.
  repository_prefix = "millrace"
  bucket_users      = ["tokenizer"] # the only stage that reads more than the file system

  facts   = jsondecode(file("${path.module}/../../shapes.json"))
  shapes  = local.facts.shapes
  regions = distinct(sort(flatten([for shape in local.shapes : keys(shape.zone_ids) if shape.neuron_devices > 0])))

  # The trainer's plan and infra-cost use the same defaults.
  fsx = {
    gib        = coalesce(var.fsx.gib, local.facts.file_system.gib)
    throughput = coalesce(var.fsx.throughput, local.facts.file_system.megabytes_per_second_per_tib)
  }

  instance_types = distinct(concat([var.trainium.shape], local.cpu_shapes))

  # Both are empty where a validation refuses the shape.
  trainium_shape    = try(merge(local.shapes[var.trainium.shape], { name = var.trainium.shape }), null)
  trainium_zone_ids = try(local.trainium_shape.zone_ids[var.region], [])

  # The network's second zone, which EKS' control plane requires, is the first other zone that offers the CPU nodes' type.
  zone_ids = [var.zone_id, [
    for zone_id in try(local.shapes[var.cpu_nodes.shape].zone_ids[var.region], ["${var.zone_id}-other"]) :
    zone_id if zone_id != var.zone_id
  ][0]]

  # The Trainium subnet's prefix is three bits longer than the VPC's. AWS reserves 5 of its addresses. The file system takes
  # one for each 1200 GiB at most, and two for its metadata.
  trainium_addresses = try(pow(2, 29 - tonumber(split("/", var.network.cidr)[1])), 0) - 5 - (2 + ceil(local.fsx.gib / 1200))
  addresses_per_card = var.efa_layout == "efa" ? 1 : 0
  addresses_per_node = local.own_addresses + local.addresses_per_card * (try(local.trainium_shape.efa_cards, 1) - 1)

  budget = var.budget.monthly_dollars == null ? null : { monthly_dollars = var.budget.monthly_dollars }
  # IAM lets nobody attach a policy to a role of Identity Center or of a service.
  stoppable_operators = [
    for arn in var.operators : { name = basename(arn), arn = arn }
    if strcontains(arn, ":${local.account.id}:role/") && length(regexall(":role/aws-(reserved|service-role)/", arn)) == 0
  ]
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

# EC2's own answer, which may be newer than infra/shapes.json. Node groups of 0 nodes are made in any zone, and only a deployment
# would meet the refusal.
data "aws_ec2_instance_type_offerings" "zone" {
  location_type = "availability-zone-id"

  filter {
    name   = "location"
    values = [var.zone_id]
  }

  filter {
    name   = "instance-type"
    values = local.instance_types
  }

  lifecycle {
    postcondition {
      condition     = length(setsubtract(local.instance_types, self.instance_types)) == 0
      error_message = "zone_id = \"${var.zone_id}\": EC2 does not offer ${join(", ", setsubtract(local.instance_types, self.instance_types))} there, whatever infra/shapes.json says. Choose another zone_id (and region), and correct the table."
    }
  }
}
