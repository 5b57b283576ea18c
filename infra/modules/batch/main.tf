# Two pools of nodes, each a compute environment that Batch raises and lowers between 0 and its most, with a queue of its
# own. A Trainium job is a gang that takes whole nodes; what needs no device does not hold any.

locals {
  # A reservation may have been made inside of a placement group; which one only its owner knows, so none is made for it.
  makes_placement_group = var.placement_group == "auto" && var.capacity.kind == "on_demand" && var.trainium.shape.supports_placement_group
  placement_group = (
    local.makes_placement_group ? aws_placement_group.trainium[0].name :
    contains(["auto", "none"], var.placement_group) ? null : var.placement_group
  )

  security_group_ids = concat(var.security_group_ids, aws_security_group.nodes[*].id)

  # One interface a card, all with EFA: Neuron's collectives want every card in the container. The first is the node's
  # own address, so it is never without one.
  interfaces = [
    for card in range(var.trainium.shape.efa_cards) : {
      network_card_index = card
      device_index       = card == 0 ? 0 : 1
      interface_type     = card == 0 ? "efa" : var.efa_layout
    }
  ]

  # A job's container gets the first two folders of the node.
  folders = { file_system = "/fsx", scratch = "/scratch" }
  marker  = ".millrace-root"
  user    = 10001 # of the images

  # The newest that AWS ParallelCluster has installed in its AMIs, which also says the checksum.
  efa_installer = { version = "1.41.0", sha256 = "3506354cdfbe31ff552fe75f5d0d9bb7efd29cf79bd99457347d29c751c38f9f" }

  # The EFA driver's package reserves 8 pages more than 10 GiB, too.
  huge_pages = var.trainium.shape.huge_pages_gib * 512 + 8

  userdata = "${path.module}/../../userdata"
  scripts_of_all = [
    templatefile("${local.userdata}/ecs-agent.sh.tftpl", { stop_seconds = var.stop_seconds }),
    templatefile("${local.userdata}/ecs-scratch.sh.tftpl", { folder = local.folders.scratch }),
    templatefile("${local.userdata}/ecs-file-system.sh.tftpl", {
      folder     = local.folders.file_system
      dns_name   = var.file_system.dns_name
      mount_name = var.file_system.mount_name
      marker     = local.marker
      user       = local.user
    }),
  ]
  scripts = {
    cpu = local.scripts_of_all
    trainium = concat(
      [templatefile("${local.userdata}/huge-pages.sh.tftpl", { pages = local.huge_pages })],
      local.scripts_of_all,
      [templatefile("${local.userdata}/ecs-efa.sh.tftpl", local.efa_installer)],
    )
  }
  user_data = {
    for pool, scripts in local.scripts : pool => templatefile("${local.userdata}/ecs.mime.tftpl", { scripts = scripts })
  }

  pools = {
    trainium = {
      shape           = var.trainium.shape.name
      vcpus           = var.trainium.shape.vcpus * var.trainium.max_nodes
      subnet_id       = var.trainium.subnet_id
      interfaces      = local.interfaces
      placement_group = local.placement_group
      capacity        = var.capacity
      ami_id          = var.ami_id
      volume_gib      = 200 # the system, and images of many GB; what stages write is on the NVMe disks
    }
    cpu = {
      shape           = var.cpu.shape.name
      vcpus           = var.cpu.shape.vcpus * var.cpu.max_nodes
      subnet_id       = var.cpu.subnet_id
      interfaces      = []
      placement_group = null
      capacity        = { kind = "on_demand", reservation_id = "" }
      ami_id          = null # Batch takes the newest of ECS itself
      volume_gib      = 100 + var.cpu.shape.storage_gib
    }
  }

  queue_limits = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"           = var.queue_limits.capacity_seconds
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE" = var.queue_limits.misconfiguration_seconds
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"         = var.queue_limits.misconfiguration_seconds
  }
}

resource "aws_placement_group" "trainium" {
  count    = local.makes_placement_group ? 1 : 0
  name     = "${var.name}-trainium"
  strategy = "cluster"
}

# The groups of EFA and Lustre let nothing else through. Nodes of a job talk to one another on Ray's ports, and to AWS.
resource "aws_security_group" "nodes" {
  count       = var.makes_node_group ? 1 : 0
  name        = "${var.name}-nodes"
  description = "Nodes of Batch: one another, and HTTPS to elsewhere"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-nodes" }
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  count                        = var.makes_node_group ? 1 : 0
  security_group_id            = aws_security_group.nodes[0].id
  description                  = "All traffic from itself"
  referenced_security_group_id = aws_security_group.nodes[0].id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  count                        = var.makes_node_group ? 1 : 0
  security_group_id            = aws_security_group.nodes[0].id
  description                  = "All traffic to itself"
  referenced_security_group_id = aws_security_group.nodes[0].id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "https" {
  count             = var.makes_node_group ? 1 : 0
  security_group_id = aws_security_group.nodes[0].id
  description       = "AWS APIs, images, packages and texts"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_launch_template" "pool" {
  for_each               = local.pools
  name                   = "${var.name}-${each.key}"
  instance_type          = each.value.capacity.kind == "capacity_block" ? each.value.shape : null # Batch ignores it, a block's template has to name it
  update_default_version = true
  user_data              = base64encode(local.user_data[each.key])

  # No public address is asked for: EC2 refuses that on instances with several interfaces.
  dynamic "network_interfaces" {
    for_each = each.value.interfaces
    content {
      network_card_index    = network_interfaces.value.network_card_index
      device_index          = network_interfaces.value.device_index
      interface_type        = network_interfaces.value.interface_type
      delete_on_termination = true
      security_groups       = local.security_group_ids
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.capacity.kind == "capacity_block" ? ["capacity-block"] : []
    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.value.capacity.kind == "on_demand" ? [] : [each.value.capacity.reservation_id]
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type           = "gp3"
      volume_size           = each.value.volume_gib
      encrypted             = true
      kms_key_id            = var.key_arn
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])
    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = "${var.name}-${each.key}" })
    }
  }
}

# Without a name, which provider 5 and 6 spell differently: it is made up, so that a successor can be there before a queue
# lets go of the old one. Without a service role: Batch then uses its service-linked one.
#
# A container has an interface of its own. Its security groups are, as Batch's guide has it, those of the compute
# environment, or the VPC's default group where that names none (docs.aws.amazon.com/batch, mnp-ce); as ParallelCluster's
# has it, which cites an older text, those of the node. Both work here: on CPU nodes the environment names the groups, and
# nodes have the same. Beside a launch template with interfaces, as Trainium nodes need one for EFA, Batch takes no groups
# (github.com/aws/aws-cdk, issue 21577): their containers are in the node's groups, or in the default one, which
# modules/network opens as far as that of the nodes. Lustre is the node's in both: the machine mounts, no container does.
resource "aws_batch_compute_environment" "pool" {
  for_each = local.pools
  type     = "MANAGED"

  compute_resources {
    type                = "EC2" # jobs of several nodes run on no Spot instances
    allocation_strategy = "BEST_FIT_PROGRESSIVE"
    instance_type       = [each.value.shape]
    instance_role       = local.instance_profile
    min_vcpus           = 0
    max_vcpus           = each.value.vcpus
    subnets             = [each.value.subnet_id]
    security_group_ids  = length(each.value.interfaces) == 0 ? local.security_group_ids : null
    placement_group     = each.value.placement_group

    # Batch knows no image with Neuron, only that one is like ECS' own.
    ec2_configuration {
      image_type        = "ECS_AL2023"
      image_id_override = each.value.ami_id
    }

    launch_template {
      launch_template_id = aws_launch_template.pool[each.key].id
      version            = aws_launch_template.pool[each.key].latest_version
    }
  }

  lifecycle {
    create_before_destroy = true
    ignore_changes        = [compute_resources[0].desired_vcpus] # Batch's to change
  }

  depends_on = [terraform_data.ready_for_nodes, aws_iam_role_policy_attachment.instance]
}

resource "terraform_data" "ready_for_nodes" {
  input = var.ready_for_nodes
}

resource "aws_batch_job_queue" "pool" {
  for_each = local.pools
  name     = "${var.name}-${each.key}"
  state    = "ENABLED"
  priority = 1

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.pool[each.key].arn
  }

  # A job that can never start, or not for hours, blocks all behind it and says nothing.
  dynamic "job_state_time_limit_action" {
    for_each = local.queue_limits
    content {
      action           = "CANCEL"
      state            = "RUNNABLE"
      reason           = job_state_time_limit_action.key
      max_time_seconds = job_state_time_limit_action.value
    }
  }
}
