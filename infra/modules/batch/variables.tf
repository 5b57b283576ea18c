variable "name" {
  description = "Begins the names of what is made."
  type        = string
}

variable "account" {
  type = object({ id = string, partition = string, region = string })
}

variable "key_arn" {
  type = string
}

variable "trainium" {
  description = "An entry of infra/shapes.json with its name, how many nodes at most, and where they are."
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
    error_message = "${var.trainium.shape.name} has ${var.trainium.shape.neuron_devices} Neuron devices and ${var.trainium.shape.efa_cards} EFA cards: a gang of Trainium nodes needs both."
  }
}

variable "cpu" {
  description = "The same for the nodes of the tokenizer and of a compiler that needs no device."
  type = object({
    shape     = object({ name = string, vcpus = number, storage_gib = number })
    max_nodes = number
    subnet_id = string
  })
}

variable "security_group_ids" {
  description = "Of all nodes: EFA's, Lustre's, or those that are there."
  type        = list(string)
}

variable "makes_node_group" {
  description = "Make a security group that lets nodes reach the AWS APIs and one another; else the given ones do."
  type        = bool
}

variable "vpc_id" {
  description = "Of that group."
  type        = string
}

variable "ready_for_nodes" {
  description = "What has to be there before a node can join; only waited for."
  type        = any
}

variable "instance_profile" {
  description = "Name or ARN of one that is there; null: it is made with its role."
  type        = string
}

variable "file_system" {
  type = object({ dns_name = string, mount_name = string })
}

variable "stages" {
  type = set(string)
}

variable "bucket_users" {
  description = "Stages that may use the prefix of their name in the bucket."
  type        = set(string)
}

variable "bucket_arn" {
  type = string
}

variable "hugging_face_secret" {
  description = "ARN of a secret in Secrets Manager that the tokenizer gets; null: none."
  type        = string
}

variable "stop_seconds" {
  description = "Between a container's SIGTERM and its SIGKILL."
  type        = number
}

variable "queue_limits" {
  description = "Seconds after which a job at the head of a queue is cancelled, that waits for capacity, or for what cannot come."
  type        = object({ capacity_seconds = number, misconfiguration_seconds = number })

  validation {
    condition = alltrue([
      for seconds in values(var.queue_limits) : seconds >= 600 && seconds <= 86400 && floor(seconds) == seconds
    ])
    error_message = "queue_limits = ${jsonencode(var.queue_limits)}: Batch takes whole seconds from 600 to 86400."
  }
}

variable "efa_layout" {
  description = "efa: every interface also has an address, as Neuron documents it. efa-only: all but the first have none."
  type        = string

  validation {
    condition     = contains(["efa", "efa-only"], var.efa_layout)
    error_message = "efa_layout is \"efa\" or \"efa-only\"; got \"${var.efa_layout}\"."
  }
}

variable "capacity" {
  type = object({ kind = string, reservation_id = string })

  validation {
    condition     = contains(["on_demand", "reservation", "capacity_block"], var.capacity.kind)
    error_message = "capacity.kind is on_demand, reservation or capacity_block; got \"${var.capacity.kind}\"."
  }

  validation {
    condition     = (var.capacity.kind == "on_demand") == (var.capacity.reservation_id == "")
    error_message = "capacity.kind = \"${var.capacity.kind}\" with reservation_id = \"${var.capacity.reservation_id}\": on_demand has none, the other two need one."
  }

  validation {
    condition     = var.capacity.kind != "capacity_block" || var.trainium.shape.supports_capacity_block
    error_message = "EC2 sells no Capacity Blocks of ${var.trainium.shape.name}."
  }
}

variable "placement_group" {
  description = "auto: one is made where that is legal. none. Or the name of one that is there."
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
  description = "Of the Trainium nodes: ECS' AL2023 with Neuron."
  type        = string
}

variable "tags" {
  description = "Of instances, their volumes and interfaces, which a provider's default tags do not reach."
  type        = map(string)
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds each role that is made; null: none."
  type        = string
}
