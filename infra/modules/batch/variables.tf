variable "name" {
  description = "Prefix of all resources' names."
  type        = string
}

variable "account" {
  type = object({ id = string, partition = string, region = string })
}

variable "key_arn" {
  type = string
}

variable "trainium" {
  description = "Trainium pool: an entry of infra/shapes.json with its name, the maximum number of nodes, and their subnet."
  type = object({
    shape = object({
      name                     = string
      vcpus                    = number
      neuron_devices           = number
      efa_cards                = number
      huge_pages_gib           = number
      supports_capacity_block  = bool
      supports_placement_group = bool
    })
    max_nodes = number
    subnet_id = string
  })

  validation {
    condition     = var.trainium.shape.neuron_devices > 0 && var.trainium.shape.efa_cards > 0
    error_message = "${var.trainium.shape.name} has ${var.trainium.shape.neuron_devices} Neuron devices and ${var.trainium.shape.efa_cards} EFA cards: nodes of a gang need both."
  }
}

variable "cpu" {
  description = "CPU pool, for the tokenizer and for a compiler without a device: instance type, maximum number of nodes, and their subnet."
  type = object({
    shape     = object({ name = string, vcpus = number, storage_gib = number })
    max_nodes = number
    subnet_id = string
  })
}

variable "security_group_ids" {
  description = "Ids of all nodes' security groups: those for EFA and Lustre, or existing ones."
  type        = list(string)
}

variable "makes_node_group" {
  description = "Whether to make a security group that lets nodes reach AWS' APIs and one another, which existing groups do already."
  type        = bool
}

variable "vpc_id" {
  description = "VPC of the security group that is made; null if none is made."
  type        = string
}

variable "ready_for_nodes" {
  description = "Resources that have to exist before a node can join. Their values are not used."
  type        = any
}

variable "instance_profile" {
  description = "Name or ARN of an existing instance profile; null to make one with its role."
  type        = string
}

variable "file_system" {
  type = object({ dns_name = string, mount_name = string })
}

variable "stages" {
  type = set(string)
}

variable "bucket_users" {
  description = "Stages that may use the prefix with their name in the bucket."
  type        = set(string)
}

variable "bucket_arn" {
  type = string
}

variable "hugging_face_secret" {
  description = "ARN of a secret in Secrets Manager that the tokenizer gets; null for none."
  type        = string
}

variable "webhook_secret" {
  description = "ARN of a secret in Secrets Manager with the URL of the notices' webhook, which the stages' commands get; null for none."
  type        = string
}

variable "stop_seconds" {
  description = "Stop timeout of containers: seconds between SIGTERM and SIGKILL."
  type        = number
}

variable "queue_limits" {
  description = "Seconds after which Batch cancels the job at the head of a queue: capacity_seconds while EC2 has no capacity, misconfiguration_seconds if no node could ever hold the job."
  type        = object({ capacity_seconds = number, misconfiguration_seconds = number })

  validation {
    condition = alltrue([
      for seconds in values(var.queue_limits) : seconds >= 600 && seconds <= 86400 && floor(seconds) == seconds
    ])
    error_message = "queue_limits = ${jsonencode(var.queue_limits)}: Batch accepts whole seconds from 600 to 86400."
  }
}

variable "efa_layout" {
  description = "With efa every interface has an IP address, as Neuron documents it. With efa-only only the first interface has one."
  type        = string

  validation {
    condition     = contains(["efa", "efa-only"], var.efa_layout)
    error_message = "efa_layout = \"${var.efa_layout}\": expected efa or efa-only."
  }
}

variable "capacity" {
  type = object({ kind = string, reservation_id = string })

  validation {
    condition     = contains(["on_demand", "reservation", "capacity_block"], var.capacity.kind)
    error_message = "capacity.kind = \"${var.capacity.kind}\": expected on_demand, reservation or capacity_block."
  }

  validation {
    condition     = (var.capacity.kind == "on_demand") == (var.capacity.reservation_id == "")
    error_message = "capacity.kind = \"${var.capacity.kind}\" with reservation_id = \"${var.capacity.reservation_id}\": on_demand takes none, the other kinds need one."
  }

  validation {
    condition     = var.capacity.kind != "capacity_block" || var.trainium.shape.supports_capacity_block
    error_message = "EC2 sells no Capacity Blocks of ${var.trainium.shape.name}."
  }
}

variable "placement_group" {
  description = "Cluster placement group: auto makes one for nodes on demand, none makes none, any other value is the name of an existing one."
  type        = string

  validation {
    condition     = var.capacity.kind != "capacity_block" || contains(["auto", "none"], var.placement_group)
    error_message = <<-EOT
      placement_group = "${var.placement_group}" with a Capacity Block: EC2 has placed the block's instances already, close
      to each other, and answers InsufficientInstanceCapacity to any other placement. Set placement_group to "auto".
    EOT
  }

  validation {
    condition     = var.trainium.shape.supports_placement_group || contains(["auto", "none"], var.placement_group)
    error_message = "${var.trainium.shape.name} cannot be in a cluster placement group: set placement_group to \"auto\"."
  }
}

variable "ami_id" {
  description = "AMI of the Trainium nodes, ECS' AL2023 with Neuron."
  type        = string
}

variable "tags" {
  description = "Tags of instances, volumes and interfaces, which do not get the provider's default tags."
  type        = map(string)
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of every role; null for none."
  type        = string
}
