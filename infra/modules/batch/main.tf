# Two pools of nodes: compute environments with a queue each, which Batch scales between 0 and their maximum. A Trainium job is a
# gang of whole nodes; stages without a device run on the other pool.

locals {
  # None is made for a reservation, which may be inside of a placement group that only its owner knows.
  makes_placement_group = var.placement_group == "auto" && var.capacity.kind == "on_demand" && var.trainium.shape.supports_placement_group
  placement_group = (
    local.makes_placement_group ? aws_placement_group.trainium[0].name :
    contains(["auto", "none"], var.placement_group) ? null : var.placement_group
  )

  security_group_ids = concat(var.security_group_ids, aws_security_group.nodes[*].id)

  # One EFA interface per card, because Neuron's collectives need every card in the container. The first interface has the
  # node's address, so it always has one.
  interfaces = [
    for card in range(var.trainium.shape.efa_cards) : {
      network_card_index = card
      device_index       = card == 0 ? 0 : 1
      interface_type     = card == 0 ? "efa" : var.efa_layout
    }
  ]

  # Jobs mount the first two folders of the node.
  folders = { file_system = "/fsx", scratch = "/scratch" }
  marker  = ".millrace-root"
  user    = 10001 # the images' user

  # The newest version that AWS ParallelCluster installs in its AMIs; it also publishes the checksum.
  efa_installer = { version = "1.41.0", sha256 = "3506354cdfbe31ff552fe75f5d0d9bb7efd29cf79bd99457347d29c751c38f9f" }

  # 8 pages more than 10 GiB, like the EFA driver's package.
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
      volume_gib      = 200 # the system and images of many GB; stages write to the NVMe disks
    }
    cpu = {
      shape           = var.cpu.shape.name
      vcpus           = var.cpu.shape.vcpus * var.cpu.max_nodes
      subnet_id       = var.cpu.subnet_id
      interfaces      = []
      placement_group = null
      capacity        = { kind = "on_demand", reservation_id = "" }
      ami_id          = null # Batch chooses ECS' newest AMI
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

# The groups of EFA and Lustre admit nothing else. Nodes of a job need Ray's ports among themselves, and HTTPS to AWS.
resource "aws_security_group" "nodes" {
  count       = var.makes_node_group ? 1 : 0
  name        = "${var.name}-nodes"
  description = "Nodes of Batch: all traffic among them, and HTTPS to the internet"
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
  instance_type          = each.value.capacity.kind == "capacity_block" ? each.value.shape : null # Batch ignores it, but a Capacity Block's launch template has to name it
  update_default_version = true
  user_data              = base64encode(local.user_data[each.key])

  # No public address: EC2 refuses one on instances with several interfaces.
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

# Without a name, which providers 5 and 6 spell differently: Terraform makes one up, so that a successor can exist before a queue
# releases its predecessor. Without a service role, so that Batch uses its service-linked one.
#
# A container has an interface of its own. According to Batch's guide (docs.aws.amazon.com/batch, mnp-ce) it gets the security
# groups of the compute environment, or the VPC's default group if that names none; according to ParallelCluster's, which cites
# an older text, it gets those of the node. Both work here. On CPU nodes the environment names the node's groups. Trainium nodes
# need a launch template with interfaces for EFA, beside which Batch refuses groups (github.com/aws/aws-cdk, issue 21577), so
# modules/network opens the default group as far as the nodes' group. Lustre needs only the node's groups, because the machine
# mounts it.
resource "aws_batch_compute_environment" "pool" {
  for_each = local.pools
  type     = "MANAGED"

  compute_resources {
    type                = "EC2" # jobs with several nodes cannot use Spot instances
    allocation_strategy = "BEST_FIT_PROGRESSIVE"
    instance_type       = [each.value.shape]
    instance_role       = local.instance_profile
    min_vcpus           = 0
    max_vcpus           = each.value.vcpus
    subnets             = [each.value.subnet_id]
    security_group_ids  = length(each.value.interfaces) == 0 ? local.security_group_ids : null
    placement_group     = each.value.placement_group

    # Batch has no image type with Neuron; the AMI counts as one of ECS' AL2023.
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
    ignore_changes        = [compute_resources[0].desired_vcpus] # Batch changes it
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

  # A job that cannot start, for hours or ever, silently blocks all jobs behind it.
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
