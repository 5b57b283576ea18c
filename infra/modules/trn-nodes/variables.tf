variable "name" {
  description = "Name of the node group."
  type        = string
}

variable "cluster" {
  type = object({ name = string, version = string, security_group_id = string })
}

variable "node_role_arn" {
  type = string
}

variable "ready_for_nodes" {
  description = "Resources that have to exist before a node can join. Their values are not used."
  type        = any
}

variable "shape" {
  description = "Instance type: an entry of infra/shapes.json, with its name."
  type = object({
    name                     = string
    neuron_devices           = number
    efa_cards                = number
    huge_pages_gib           = number
    supports_capacity_block  = bool
    supports_placement_group = bool
  })

  validation {
    condition     = var.shape.neuron_devices > 0 && var.shape.efa_cards > 0
    error_message = "${var.shape.name} has ${var.shape.neuron_devices} Neuron devices and ${var.shape.efa_cards} EFA cards: nodes of a gang need both."
  }
}

variable "max_nodes" {
  type = number
}

variable "subnets" {
  description = "Subnets of the nodes, all in one zone."
  type        = list(object({ id = string, zone_id = string }))

  validation {
    condition     = length(distinct(var.subnets[*].zone_id)) == 1
    error_message = <<-EOT
      A Trainium pool is in one zone, and these subnets are in ${jsonencode(distinct(var.subnets[*].zone_id))}.
      EFA does not cross zones, so a gang over two of them starts and then waits for ever in its first collective.
      Give the subnets of one zone; nodes of another are another pool.
    EOT
  }
}

variable "security_group_ids" {
  description = "Ids of the nodes' security groups, in addition to the cluster's own."
  type        = list(string)
}

variable "key_arn" {
  type = string
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
    condition     = var.capacity.kind != "capacity_block" || var.shape.supports_capacity_block
    error_message = "EC2 sells no Capacity Blocks of ${var.shape.name}."
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
    condition     = var.shape.supports_placement_group || contains(["auto", "none"], var.placement_group)
    error_message = "${var.shape.name} cannot be in a cluster placement group: set placement_group to \"auto\"."
  }
}

variable "labels" {
  type = map(string)
}

variable "taint" {
  description = "Taint of the nodes, with the effect as Kubernetes spells it."
  type        = object({ key = string, value = string, effect = string })
}

variable "tags" {
  description = "Tags of instances, volumes and interfaces, which do not get the provider's default tags."
  type        = map(string)
}

variable "ami_release" {
  description = "Release of the Neuron AMI, such as 1.35.4-20260505. The images have to accept its driver."
  type        = string
}
