# EKS for the three stages: what is always there (control plane, core nodes, NAT, file system), and node groups at 0 that a
# deployment raises and lowers. AWS alone: what runs inside of the cluster comes from infra/addons and k8s/, so that no
# provider here depends on a cluster that may not be there.

locals {
  tags = { "millrace.dev/stack" = var.name }

  account = {
    id        = data.aws_caller_identity.current.account_id
    partition = data.aws_partition.current.partition
    region    = var.region
  }

  # Names that k8s/ has too; tests/contract/test_infra.py holds the two together.
  namespace         = "millrace"
  operators_group   = "millrace-deployers"
  repository_prefix = "millrace"
  images            = ["head", "tokenizer", "compiler", "trainer"]
  stages            = ["tokenizer", "compiler", "trainer"]
  node_scalers      = ["deployer", "reaper"]
  node_groups       = { core = "core", cpu = "cpu", trainium = "trainium" } # by pool
  pool_label        = "millrace.dev/pool"
  shape_label       = "millrace.dev/shape"
  taint             = { key = "aws.amazon.com/neuron", value = "true", effect = "NoSchedule" }

  # EKS tells no instance type of a node group whose launch template says it, so a label does.
  node_shapes = { core = var.core_nodes.shape, cpu = var.cpu_nodes.shape, trainium = var.trainium.shape } # by pool
  node_labels = { for pool, shape in local.node_shapes : pool => { (local.pool_label) = pool, (local.shape_label) = shape } }
  node_taints = { core = [], cpu = [], trainium = [local.taint] }
}

# Instance facts, and what follows from them.
locals {
  facts   = jsondecode(file("${path.module}/../../shapes.json"))
  shapes  = local.facts.shapes
  regions = distinct(sort(flatten([for shape in local.shapes : keys(shape.zone_ids) if shape.neuron_devices > 0])))

  # The trainer's plan and infra-cost go by the same defaults.
  fsx = {
    gib        = coalesce(var.fsx.gib, local.facts.file_system.gib)
    throughput = coalesce(var.fsx.throughput, local.facts.file_system.megabytes_per_second_per_tib)
  }

  # null where validation refuses the shape.
  trainium_shape    = try(merge(local.shapes[var.trainium.shape], { name = var.trainium.shape }), null)
  trainium_zone_ids = try(local.trainium_shape.zone_ids[var.region], [])

  # EKS wants a second zone for its control plane: the first other one of the CPU nodes' type.
  zone_ids = [var.zone_id, [
    for zone_id in try(local.shapes[var.cpu_nodes.shape].zone_ids[var.region], ["${var.zone_id}-other"]) :
    zone_id if zone_id != var.zone_id
  ][0]]

  # Addresses that the CNI holds ready for pods on a node: a stage's pod and the daemons without the host's network.
  pod_addresses = { least = 12, spare = 4 }

  # The prefix of the Trainium subnet is three bits longer than the VPC's. AWS keeps 5 addresses of a subnet; a file server
  # takes one, and there is at most one for each 1200 GiB, beside the two that hold metadata.
  trainium_addresses = try(pow(2, 29 - tonumber(split("/", var.network.cidr)[1])), 0) - 5 - (2 + ceil(local.fsx.gib / 1200))
  own_addresses      = 1 + local.pod_addresses.least + local.pod_addresses.spare
  addresses_per_node = local.own_addresses + local.addresses_per_card * (try(local.trainium_shape.efa_cards, 1) - 1)
  addresses_per_card = var.efa_layout == "efa" ? 1 : 0
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

# The role behind a session, which is what an access entry names.
data "aws_iam_session_context" "current" {
  arn = data.aws_caller_identity.current.arn
}

module "network" {
  source                     = "../../modules/network"
  name                       = var.name
  region                     = var.region
  cidr                       = var.network.cidr
  zone_ids                   = local.zone_ids
  enable_interface_endpoints = var.enable_interface_endpoints
  endpoints_of_target        = ["eks", "eks-auth", "monitoring"]
  flow_log                   = var.enable_flow_log ? { log_group_arn = module.storage.log_group_arns["flow"] } : null
}

module "storage" {
  source                 = "../../modules/storage"
  name                   = var.name
  region                 = var.region
  account_id             = local.account.id
  partition              = local.account.partition
  keep_data              = var.keep_data
  log_retention_days     = var.log_retention_days
  enable_data_repository = var.enable_dra
  log_groups             = { control_plane = "/aws/eks/${var.name}/cluster" } # EKS writes there, and would make it without an end
  fsx = var.enable_fsx ? {
    gib               = local.fsx.gib
    throughput        = local.fsx.throughput
    subnet_id         = module.network.trainium_subnet.id
    security_group_id = module.network.fsx_security_group_id
  } : null
}

module "registry" {
  source    = "../../modules/registry"
  prefix    = local.repository_prefix
  images    = toset(local.images)
  key_arn   = module.storage.key_arn
  keep_data = var.keep_data
}

module "eks" {
  source                    = "../../modules/eks"
  name                      = var.name
  account                   = local.account
  kubernetes_version        = var.kubernetes_version
  api_public_cidrs          = var.api_public_cidrs
  key_arn                   = module.storage.key_arn
  log_group_arn             = module.storage.log_group_arns["control_plane"]
  core_pool                 = { (local.pool_label) = "core" }
  trainium_pod_addresses    = local.pod_addresses
  administrators            = distinct(concat(var.administrators, [data.aws_iam_session_context.current.issuer_arn]))
  operators                 = var.operators
  operators_group           = local.operators_group
  bucket_arn                = module.storage.bucket.arn
  namespace                 = local.namespace
  stages                    = toset(local.stages)
  node_scalers              = toset(local.node_scalers)
  stop_policy_arn           = module.guardrails.stop_policy_arn
  scaled_node_groups        = [local.node_groups.trainium, local.node_groups.cpu]
  addon_versions            = var.addon_versions
  enable_addons             = var.enable_addons
  enable_container_insights = var.idle_alarm != null
  enable_pod_identity       = var.enable_pod_identity
  enable_access_entries     = var.enable_access_entries
  network = {
    control_plane_subnet_ids = module.network.control_plane_subnet_ids
    nodes_subnet_id          = module.network.nodes_subnet_id
    fsx_security_group_id    = module.network.fsx_security_group_id
    routes                   = module.network.routes
  }
  pools = {
    (local.node_groups.core) = {
      shape      = local.node_shapes.core
      nodes      = var.core_nodes.nodes
      min_nodes  = 1
      max_nodes  = var.core_nodes.nodes + 1
      volume_gib = 100
      labels     = local.node_labels.core
    }
    (local.node_groups.cpu) = {
      shape      = local.node_shapes.cpu
      nodes      = 0
      min_nodes  = 0
      max_nodes  = var.cpu_nodes.max_nodes
      volume_gib = 100 + try(local.shapes[var.cpu_nodes.shape].pod.storage_gib, 0) # the system and images, and what the pod may take
      labels     = local.node_labels.cpu
    }
  }
}

module "trainium" {
  source             = "../../modules/trn-nodes"
  name               = local.node_groups.trainium
  cluster            = module.eks.cluster
  node_role_arn      = module.eks.node_role_arn
  ready_for_nodes    = module.eks.ready_for_nodes
  shape              = local.trainium_shape
  max_nodes          = var.trainium.max_nodes
  subnets            = [module.network.trainium_subnet]
  security_group_ids = [module.network.efa_security_group_id, module.network.fsx_security_group_id]
  key_arn            = module.storage.key_arn
  efa_layout         = var.efa_layout
  capacity           = { kind = var.capacity.kind, reservation_id = var.capacity.reservation_id }
  placement_group    = var.placement_group
  labels             = local.node_labels.trainium
  taint              = local.taint
  tags               = local.tags
  ami_release        = var.ami_release
}

module "guardrails" {
  source  = "../../modules/guardrails"
  name    = var.name
  account = local.account
  key_arn = module.storage.key_arn
  budget  = var.budget.monthly_dollars == null ? null : { monthly_dollars = var.budget.monthly_dollars }
  emails  = var.budget.emails
  stopped_roles = concat(
    [for account, role in module.eks.pod_roles : role if account == "deployer"],
    # IAM lets nobody attach a policy to a role of Identity Center or of a service.
    [
      for arn in var.operators : { name = basename(arn), arn = arn }
      if strcontains(arn, ":${local.account.id}:role/") && length(regexall(":role/aws-(reserved|service-role)/", arn)) == 0
    ],
  )
  trainium_autoscaling_group = module.trainium.autoscaling_group
  trainium_max_nodes         = var.trainium.max_nodes
  zero_schedule              = var.zero_schedule
  denied_actions             = ["eks:UpdateNodegroupConfig", "eks:CreateNodegroup", "autoscaling:SetDesiredCapacity", "autoscaling:UpdateAutoScalingGroup"]
  idle_alarm                 = var.enable_addons ? var.idle_alarm : null
}
