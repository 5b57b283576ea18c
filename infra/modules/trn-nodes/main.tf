locals {
  full_name = "${var.cluster.name}-${var.name}"

  # None is made for a reservation, which may be inside of a placement group that only its owner knows.
  makes_placement_group = var.placement_group == "auto" && var.capacity.kind == "on_demand" && var.shape.supports_placement_group
  placement_group = (
    local.makes_placement_group ? aws_placement_group.this[0].name :
    contains(["auto", "none"], var.placement_group) ? null : var.placement_group
  )

  # One EFA interface per card, because Neuron's collectives need every card in the container. The first interface has the
  # node's address, so it always has one.
  interfaces = [
    for card in range(var.shape.efa_cards) : {
      network_card_index = card
      device_index       = card == 0 ? 0 : 1
      interface_type     = card == 0 ? "efa" : var.efa_layout
    }
  ]

  # 8 pages more than 10 GiB, like the EFA driver's package.
  huge_pages = var.shape.huge_pages_gib * 512 + 8

  user_data = templatefile("${path.module}/../../userdata/trainium.mime.tftpl", {
    huge_pages  = templatefile("${path.module}/../../userdata/huge-pages.sh.tftpl", { pages = local.huge_pages })
    node_config = file("${path.module}/../../userdata/nodeconfig.yaml")
  })

  # EKS' API and Kubernetes spell a taint's effect differently.
  taint_effects = { NoSchedule = "NO_SCHEDULE", NoExecute = "NO_EXECUTE", PreferNoSchedule = "PREFER_NO_SCHEDULE" }
}

resource "aws_placement_group" "this" {
  count    = local.makes_placement_group ? 1 : 0
  name     = local.full_name
  strategy = "cluster"
}

resource "aws_launch_template" "this" {
  name                   = local.full_name
  instance_type          = var.shape.name # not in the node group, because a Capacity Block's launch template has to name it
  update_default_version = true
  user_data              = base64encode(local.user_data)

  # No public address: EC2 refuses one on instances with several interfaces.
  dynamic "network_interfaces" {
    for_each = local.interfaces
    content {
      network_card_index    = network_interfaces.value.network_card_index
      device_index          = network_interfaces.value.device_index
      interface_type        = network_interfaces.value.interface_type
      delete_on_termination = true
      security_groups       = concat([var.cluster.security_group_id], var.security_group_ids)
    }
  }

  dynamic "placement" {
    for_each = local.placement_group == null ? [] : [local.placement_group]
    content {
      group_name = placement.value
    }
  }

  dynamic "instance_market_options" {
    for_each = var.capacity.kind == "capacity_block" ? ["capacity-block"] : []
    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity.kind == "on_demand" ? [] : [var.capacity.reservation_id]
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1 # pods, one hop further, get no credentials of the node, but have identities of their own
  }

  # Only for the system: containerd and the kubelet use the NVMe disks.
  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type           = "gp3"
      volume_size           = 100
      encrypted             = true
      kms_key_id            = var.key_arn
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])
    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = local.full_name })
    }
  }
}

resource "aws_eks_node_group" "this" {
  cluster_name    = var.cluster.name
  node_group_name = var.name
  node_role_arn   = var.node_role_arn
  subnet_ids      = var.subnets[*].id
  version         = var.cluster.version
  release_version = var.ami_release
  ami_type        = "AL2023_x86_64_NEURON"
  capacity_type   = var.capacity.kind == "capacity_block" ? "CAPACITY_BLOCK" : "ON_DEMAND"
  labels          = var.labels

  launch_template {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }

  # Deployments start and stop the nodes.
  scaling_config {
    desired_size = 0
    min_size     = 0
    max_size     = var.max_nodes
  }

  # A gang stops with its first replaced node, so all are replaced at once: one restart instead of one per node.
  update_config {
    max_unavailable_percentage = 100
  }

  node_repair_config {
    enabled = true
  }

  taint {
    key    = var.taint.key
    value  = var.taint.value
    effect = local.taint_effects[var.taint.effect]
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size] # deployments change it
  }

  depends_on = [terraform_data.ready_for_nodes]
}

resource "terraform_data" "ready_for_nodes" {
  input = var.ready_for_nodes
}
