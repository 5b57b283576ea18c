# For another region or for trn2: change region, zone_id and trainium.shape in terraform.tfvars, nothing else. What an
# instance type has, and the zones that offer it, is said in infra/shapes.json alone.

variable "region" {
  description = "A region that infra/shapes.json knows."
  type        = string

  validation {
    condition     = contains(local.regions, var.region)
    error_message = <<-EOT
      region = "${var.region}": infra/shapes.json knows no Trainium there.
      It knows ${join(", ", local.regions)}. Where AWS offers it elsewhere by now, add the zone ids to the shape's zone_ids.
    EOT
  }
}

variable "name" {
  description = "The beginning of the names of what is made. One stack a region: the repositories in ECR are millrace/... whatever the name."
  type        = string
  default     = "millrace"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,22}[a-z0-9]$", var.name))
    error_message = "name = \"${var.name}\": 3 to 24 small letters, digits and hyphens, a letter first; roles and the bucket carry it with the account and region."
  }
}

variable "config" {
  description = "Path of a config.txt: of REGION, SUBNET, SG, ECR_REPO, INSTANCE_ROLE, FSX_DNS_NAME and MOUNT_NAME each that has a value is there already, and is used in place of a new one. null: all is made."
  type        = string
  default     = null

  validation {
    condition     = var.config == null ? true : fileexists(var.config)
    error_message = "config = \"${coalesce(var.config, "-")}\": no such file. It is one of KEY=VALUE lines, such as SUBNET=subnet-0123456789abcdef0; a path is taken from the folder of the stack."
  }
}

variable "zone_id" {
  description = "Zone of all nodes, by id: zones' names differ from account to account."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+[0-9]-az[0-9]+$", var.zone_id))
    error_message = <<-EOT
      zone_id = "${var.zone_id}" is not the id of one zone. Ids look like usw2-az4; us-west-2d is a name, and names mean
      other zones in other accounts. The ids and names of yours:
        aws ec2 describe-availability-zones --region ${var.region} --query 'AvailabilityZones[].[ZoneId,ZoneName]'
    EOT
  }

  validation {
    condition     = contains(local.trainium_zone_ids, var.zone_id) || !contains(keys(local.shapes), var.trainium.shape)
    error_message = <<-EOT
      zone_id = "${var.zone_id}": ${var.trainium.shape} is not offered there.
      In ${var.region} it is offered in: ${join(", ", local.trainium_zone_ids)}${length(local.trainium_zone_ids) == 0 ? "no zone; choose another region or shape" : ""}.
      Is that out of date?
        aws ec2 describe-instance-type-offerings --region ${var.region} --location-type availability-zone-id --filters Name=instance-type,Values=${var.trainium.shape}
      Then add the zone to infra/shapes.json.
    EOT
  }

  validation {
    condition     = contains(try(local.shapes[var.cpu_nodes.shape].zone_ids[var.region], []), var.zone_id) || !contains(keys(local.shapes), var.cpu_nodes.shape)
    error_message = "zone_id = \"${var.zone_id}\": ${var.cpu_nodes.shape} is not offered there, and all nodes are in one zone. Choose another shape for cpu_nodes, or another zone_id."
  }
}

variable "trainium" {
  description = "Nodes of the trainer: their type, and how many there may be at a time. Batch brings them for a job."
  type = object({
    shape     = optional(string, "trn1.32xlarge")
    max_nodes = optional(number, 4)
  })
  default = {}

  validation {
    condition     = try(local.shapes[var.trainium.shape].efa_cards > 0 && local.shapes[var.trainium.shape].neuron_devices > 0, false)
    error_message = "trainium.shape = \"${var.trainium.shape}\" is no Trainium type with EFA of infra/shapes.json, which has ${join(", ", [for name, shape in local.shapes : name if shape.neuron_devices > 0])}. Another one: add it there. Types with GPUs are there for the trainer's plan alone."
  }

  validation {
    condition     = var.trainium.max_nodes >= 1 && floor(var.trainium.max_nodes) == var.trainium.max_nodes
    error_message = "trainium.max_nodes = ${var.trainium.max_nodes}: a whole number, 1 or more. 1 costs nothing either: nodes come with a job."
  }

  # Here in full, because a condition may not look at a local that looks at the same variable.
  validation {
    condition = try(
      var.config != null || var.trainium.max_nodes * (local.own_addresses + local.addresses_per_card * (local.shapes[var.trainium.shape].efa_cards - 1)) <= local.trainium_addresses,
      true, # an unknown shape is refused above
    )
    error_message = <<-EOT
      trainium.max_nodes = ${var.trainium.max_nodes}: the Trainium subnet of network.cidr = ${var.network.cidr} has ${local.trainium_addresses} addresses beside the file system's,
      and a node takes ${local.own_addresses + try(local.addresses_per_card * (local.shapes[var.trainium.shape].efa_cards - 1), 0)}: ${local.own_addresses} for itself and its container, ${local.addresses_per_card} for each EFA interface beside the first.
      Set network.cidr to a larger block (a shorter prefix), or efa_layout to "efa-only", with which those have none.
    EOT
  }
}

variable "cpu_nodes" {
  description = "Nodes of the tokenizer and the compiler: their type, and how many there may be at a time. Batch brings them for a job."
  type = object({
    shape     = optional(string, "m7i.8xlarge")
    max_nodes = optional(number, 4)
  })
  default = {}

  validation {
    condition     = try(local.shapes[var.cpu_nodes.shape].neuron_devices == 0 && local.shapes[var.cpu_nodes.shape].gpus == 0 && local.shapes[var.cpu_nodes.shape].pod != null, false)
    error_message = "cpu_nodes.shape = \"${var.cpu_nodes.shape}\" is no type of infra/shapes.json without Neuron and GPUs that leaves a stage room, which are ${join(", ", [for name, shape in local.shapes : name if shape.neuron_devices == 0 && shape.gpus == 0 && shape.pod != null])}."
  }

  validation {
    condition     = var.cpu_nodes.max_nodes >= 1 && floor(var.cpu_nodes.max_nodes) == var.cpu_nodes.max_nodes
    error_message = "cpu_nodes.max_nodes = ${var.cpu_nodes.max_nodes}: a whole number, 1 or more. They come with a job."
  }
}

variable "capacity" {
  description = "How Trainium nodes are bought: on_demand, reservation (an On-Demand Capacity Reservation) or capacity_block, the latter two with an id, and with their end where they have one (RFC 3339)."
  type = object({
    kind           = optional(string, "on_demand")
    reservation_id = optional(string, "")
    ends_at        = optional(string, "")
  })
  default = {}

  validation {
    condition     = contains(["on_demand", "reservation", "capacity_block"], var.capacity.kind)
    error_message = "capacity.kind = \"${var.capacity.kind}\": on_demand, reservation or capacity_block."
  }

  validation {
    condition     = var.capacity.kind == "on_demand" || can(regex("^cr-[0-9a-f]+$", var.capacity.reservation_id))
    error_message = <<-EOT
      capacity.kind = "${var.capacity.kind}" needs the reservation's id, cr- and hexadecimal digits; got "${var.capacity.reservation_id}". Yours:
        aws ec2 describe-capacity-reservations --region ${var.region} --filters Name=instance-type,Values=${var.trainium.shape}
    EOT
  }

  validation {
    condition     = var.capacity.kind != "on_demand" || (var.capacity.reservation_id == "" && var.capacity.ends_at == "")
    error_message = "capacity.kind = \"on_demand\" has no reservation_id and no ends_at: what is reserved would be paid for and not used. Set kind to reservation or capacity_block."
  }

  validation {
    condition     = var.capacity.kind != "capacity_block" || try(local.trainium_shape.supports_capacity_block, true)
    error_message = "capacity.kind = \"capacity_block\": EC2 sells no Capacity Blocks of ${var.trainium.shape}. Choose on_demand or reservation."
  }

  validation {
    condition     = var.capacity.ends_at == "" ? var.capacity.kind != "capacity_block" : can(timeadd(var.capacity.ends_at, "0s"))
    error_message = <<-EOT
      capacity.ends_at = "${var.capacity.ends_at}": a time such as 2027-01-31T11:30:00Z. A Capacity Block always has one (EndDate of
      describe-capacity-reservations); EC2 ends the instances 30 minutes earlier, and no job is worth starting whose time is longer.
    EOT
  }
}

variable "placement_group" {
  description = "auto: one for nodes on demand. none. Or the name of the one that a reservation was made in."
  type        = string
  default     = "auto"

  validation {
    condition     = var.capacity.kind != "capacity_block" || contains(["auto", "none"], var.placement_group)
    error_message = <<-EOT
      placement_group = "${var.placement_group}" with a Capacity Block: EC2 has placed the block's instances already, close to each
      other, and answers InsufficientInstanceCapacity to any other placement. Set placement_group to "auto".
    EOT
  }
}

variable "efa_layout" {
  description = "efa: every interface has an address too, as Neuron documents it for trn1. efa-only: only the first has one."
  type        = string
  default     = "efa"

  validation {
    condition     = contains(["efa", "efa-only"], var.efa_layout)
    error_message = "efa_layout = \"${var.efa_layout}\": efa or efa-only."
  }
}

variable "network" {
  description = "Addresses of the VPC, where one is made; an eighth of them is the Trainium nodes'."
  type        = object({ cidr = optional(string, "10.0.0.0/16") })
  default     = {}

  validation {
    condition     = can(cidrnetmask(var.network.cidr)) && try(tonumber(split("/", var.network.cidr)[1]) >= 16 && tonumber(split("/", var.network.cidr)[1]) <= 22, false)
    error_message = "network.cidr = \"${var.network.cidr}\": an IPv4 block of /16 to /22, such as 10.0.0.0/16."
  }
}

variable "fsx" {
  description = "The file system, where one is made: GiB, and MB/s a TiB, by default those of file_system in infra/shapes.json. They decide how long a checkpoint takes (make infra-cost says it); the throughput can be changed in place."
  type = object({
    gib        = optional(number)
    throughput = optional(number)
  })
  default = {}

  validation {
    condition     = var.fsx.gib == null ? true : var.fsx.gib == 1200 || (var.fsx.gib > 0 && var.fsx.gib % 2400 == 0)
    error_message = "fsx.gib = ${coalesce(var.fsx.gib, 0)}: PERSISTENT_2 comes in 1200, 2400, and steps of 2400 from there."
  }

  validation {
    condition     = var.fsx.throughput == null ? true : contains([125, 250, 500, 1000], var.fsx.throughput)
    error_message = "fsx.throughput = ${coalesce(var.fsx.throughput, 0)}: 125, 250, 500 or 1000 MB/s a TiB."
  }
}

variable "queue_limits" {
  description = "When a job at the head of a queue is cancelled: while EC2 has no capacity, and when no node could ever hold it."
  type = object({
    capacity_seconds         = optional(number, 7200)
    misconfiguration_seconds = optional(number, 600)
  })
  default = {}

  validation {
    condition = alltrue([
      for seconds in values(var.queue_limits) : seconds >= 600 && seconds <= 86400 && floor(seconds) == seconds
    ])
    error_message = "queue_limits = ${jsonencode(var.queue_limits)}: Batch takes whole seconds from 600 to 86400."
  }
}

variable "hugging_face_secret" {
  description = "ARN of a secret in Secrets Manager, under AWS' own key, whose whole value is a Hugging Face token, for texts and vocabularies that are gated; null: none."
  type        = string
  default     = null

  validation {
    condition     = var.hugging_face_secret == null ? true : can(regex("^arn:[a-z-]+:secretsmanager:${var.region}:[0-9]{12}:secret:.+$", var.hugging_face_secret))
    error_message = <<-EOT
      hugging_face_secret = "${coalesce(var.hugging_face_secret, "-")}" is no ARN of a secret in ${var.region}. To make one:
        aws secretsmanager create-secret --region ${var.region} --name hugging-face --secret-string file://token --query ARN
    EOT
  }
}

variable "ami_id" {
  description = "Of the Trainium nodes: ECS' AL2023 with Neuron. null: the newest at each apply, which then replaces the compute environment, and which may have a newer Neuron driver than the images take (driver_before in images/platforms.toml): on a node, modinfo -F version neuron."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null ? true : can(regex("^ami-[0-9a-f]+$", var.ami_id))
    error_message = <<-EOT
      ami_id = "${coalesce(var.ami_id, "-")}" is no id of an image. The newest now:
        aws ssm get-parameter --region ${var.region} --name /aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id --query Parameter.Value
    EOT
  }
}

variable "budget" {
  description = "What the whole account may cost in a month, and who is told. Without monthly_dollars there is no budget: at 100 % operators submit no jobs until somebody resets its action, and no default knows what else the account pays for."
  type = object({
    monthly_dollars = optional(number)
    emails          = optional(list(string), [])
  })
  default = {}

  validation {
    condition     = var.budget.monthly_dollars == null ? true : var.budget.monthly_dollars > 0
    error_message = "budget.monthly_dollars = ${coalesce(var.budget.monthly_dollars, 0)}: more than 0, and more than the stack costs while it stands (make infra-plan). To have no budget, leave it out."
  }

  validation {
    condition     = alltrue([for address in var.budget.emails : can(regex("^[^@ ]+@[^@ ]+\\.[^@ ]+$", address))])
    error_message = "budget.emails has what is no address: ${jsonencode(var.budget.emails)}."
  }
}

variable "operators" {
  description = "IAM roles and users that deploy stages, by ARN: a budget that is spent stops the roles."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.operators : can(regex("^arn:[a-z-]+:iam::[0-9]{12}:(role|user)/", arn))])
    error_message = "operators has what is no role or user: ${jsonencode(var.operators)}. Such as arn:aws:iam::111122223333:role/research; of a session, the role behind it."
  }
}

variable "keep_data" {
  description = "Refuse to destroy a bucket or repository that is not empty."
  type        = bool
  default     = true
}

variable "log_retention_days" {
  type    = number
  default = 90

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "log_retention_days = ${var.log_retention_days}: CloudWatch keeps logs for 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545 or 731 days."
  }
}

variable "aws_endpoint" {
  description = "Of tests: where an AWS answers that is none."
  type        = string
  default     = null
}

# Each of these leaves a part out, for who has it already and for a test where it cannot be had.

variable "enable_interface_endpoints" {
  description = "Reach the AWS APIs through the VPC; ten endpoints, billed by the hour. Saves NAT's charge for that traffic; NAT stays."
  type        = bool
  default     = false
}

variable "enable_dra" {
  description = "Copy checkpoints from the file system to the bucket."
  type        = bool
  default     = true
}

variable "enable_flow_log" {
  type    = bool
  default = true
}
