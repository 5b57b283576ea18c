# EKS for the three stages. The control plane, core nodes, NAT gateway and file system are always up; a deployment raises the
# other node groups from 0 and lowers them again. Only AWS resources are here: infra/addons and k8s/ install what runs in the
# cluster, so that no provider here depends on a cluster that may not exist.

locals {
  # k8s/ has these names too; tests/contract/test_infra.py compares them.
  namespace       = "millrace"
  operators_group = "millrace-deployers"
  images          = ["head", "tokenizer", "compiler", "trainer"]
  node_scalers    = ["deployer", "reaper"]
  node_groups     = { core = "core", cpu = "cpu", trainium = "trainium" } # by pool
  pool_label      = "millrace.dev/pool"
  shape_label     = "millrace.dev/shape"
  taint           = { key = "aws.amazon.com/neuron", value = "true", effect = "NoSchedule" }

  # The launch templates set the instance type, and then EKS reports none for the node group, so a label carries it.
  node_shapes = { core = var.core_nodes.shape, cpu = var.cpu_nodes.shape, trainium = var.trainium.shape } # by pool
  node_labels = { for pool, shape in local.node_shapes : pool => { (local.pool_label) = pool, (local.shape_label) = shape } }
  node_taints = { core = [], cpu = [], trainium = [local.taint] }

  eks_releases   = jsondecode(file("${path.module}/../../aws_releases.json")).eks
  addon_versions = try(local.eks_releases.versions[var.kubernetes_version].addons, {})

  # Dates of the AMI releases with a Neuron driver for trn1 or trn2, and those of the AMIs by the word in their names.
  generation    = substr(var.trainium.shape, 0, 4)
  neuron_dates  = keys(lookup(local.eks_releases.releases, local.generation, {}))
  trainium_date = coalesce(var.ami_release, lookup(local.eks_releases.defaults, local.generation, null), "none")
  ami_dates     = { neuron = local.trainium_date, standard = coalesce(var.cpu_ami_release, local.trainium_date) }

  # EKS calls a release 1.35.4-20260505. An AMI's name has no patch version of Kubernetes, its description has.
  ami_releases = { for kind, ami in data.aws_ami.node : kind => "${regex("k8s: ([0-9.]+)", ami.description)[0]}-${local.ami_dates[kind]}" }

  # common.tf checks these.
  cpu_shapes    = [var.cpu_nodes.shape, var.core_nodes.shape]
  makes_network = true

  # The CNI keeps these addresses ready on a node, for a stage's pod and for daemons without the host's network.
  pod_addresses = { least = 12, spare = 4 }
  own_addresses = 1 + local.pod_addresses.least + local.pod_addresses.spare

  # The add-on that sends pods' logs and the idle alarm's metric. Its Fluent Bit does not run without its agent.
  has_pod_logs           = var.enable_addons && var.enable_pod_logs
  has_container_insights = var.enable_addons && (var.idle_alarm != null || var.enable_pod_logs)

  # Files of pods' logs on the nodes, by log group. A stage has the name of its group on AWS Batch; it has the pods of its gang,
  # its deploy Job, whose log is the driver's, and its subcommands. All other pods of the namespace belong to the head.
  stages = [for image in local.images : image if image != "head"]
  stage_files = {
    for stage in local.stages : stage => [
      "/var/log/containers/*_${local.namespace}_${stage}-*.log",
      "/var/log/containers/deploy-${stage}-*_${local.namespace}_*.log",
      "/var/log/containers/one-off-${stage}-*_${local.namespace}_*.log",
    ]
  }
  operator_namespaces = ["kuberay-system", "volcano-system"]
  pod_files = merge(
    { for stage, files in local.stage_files : stage => { files = files, excluded_files = [] } },
    {
      head = {
        files          = ["/var/log/containers/*_${local.namespace}_*.log"]
        excluded_files = flatten(values(local.stage_files))
      }
      operators = {
        files = concat(
          [for namespace in local.operator_namespaces : "/var/log/containers/*_${namespace}_*.log"],
          ["/var/log/containers/fsx-csi-*_kube-system_*.log"],
        )
        excluded_files = []
      }
    },
  )

  # AWS would make each of these log groups without an end to its logs.
  log_groups = merge(
    { control_plane = "/aws/eks/${var.name}/cluster" },
    local.has_container_insights ? { container_insights = "/aws/containerinsights/${var.name}/performance" } : {},
    local.has_pod_logs ? { for name in keys(local.pod_files) : name => "/${var.name}/${name}" } : {},
  )
}

data "aws_ami_ids" "node" {
  for_each           = local.ami_dates
  owners             = ["amazon"]
  include_deprecated = true

  filter {
    name   = "name"
    values = ["amazon-eks-node-al2023-x86_64-${each.key}-${var.kubernetes_version}-v${each.value}"]
  }

  lifecycle {
    postcondition {
      condition     = length(self.ids) > 0
      error_message = "${var.region} has no ${each.key} AMI of the release ${each.value} for Kubernetes ${var.kubernetes_version}; AWS may have withdrawn it. Write another into ${each.key == "neuron" ? "ami_release: infra/aws_releases.json lists them" : "cpu_ami_release"}."
    }
  }
}

data "aws_ami" "node" {
  for_each           = data.aws_ami_ids.node
  owners             = ["amazon"]
  include_deprecated = true

  filter {
    name   = "image-id"
    values = [each.value.ids[0]]
  }
}

# An access entry names the role behind a session.
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
  uses_default_group         = false
  permissions_boundary       = var.permissions_boundary
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
  permissions_boundary   = var.permissions_boundary
  log_groups             = local.log_groups
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
  kubernetes_support        = var.kubernetes_support
  ami_release               = local.ami_releases.standard
  api_public_cidrs          = var.api_public_cidrs
  key_arn                   = module.storage.key_arn
  permissions_boundary      = var.permissions_boundary
  log_group_arns            = [for name in keys(local.log_groups) : module.storage.log_group_arns[name]]
  core_pool                 = { (local.pool_label) = "core" }
  trainium_pod_addresses    = local.pod_addresses
  caller_arn                = data.aws_iam_session_context.current.issuer_arn
  administrators            = var.administrators
  operators                 = var.operators
  operators_group           = local.operators_group
  bucket_arn                = module.storage.bucket.arn
  namespace                 = local.namespace
  bucket_users              = toset(local.bucket_users)
  node_scalers              = toset(local.node_scalers)
  stop_policy_arn           = module.guardrails.stop_policy_arn
  scaled_node_groups        = [local.node_groups.trainium, local.node_groups.cpu]
  addon_versions            = merge(local.addon_versions, var.addon_versions)
  enable_addons             = var.enable_addons
  enable_container_insights = local.has_container_insights
  tags                      = local.tags
  metrics_log_group_arn     = local.has_container_insights ? module.storage.log_group_arns["container_insights"] : null
  pod_logs = local.has_pod_logs ? {
    for name, each in local.pod_files : name => merge(each, {
      log_group     = module.storage.log_groups[name]
      log_group_arn = module.storage.log_group_arns[name]
    })
  } : {}
  enable_pod_identity   = var.enable_pod_identity
  enable_access_entries = var.enable_access_entries
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
      volume_gib = 100 + try(local.shapes[var.cpu_nodes.shape].pod.storage_gib, 0) # the system, images, and the pod's own storage
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
  ami_release        = local.ami_releases.neuron
}

module "guardrails" {
  source               = "../../modules/guardrails"
  name                 = var.name
  account              = local.account
  key_arn              = module.storage.key_arn
  permissions_boundary = var.permissions_boundary
  budget               = local.budget
  emails               = var.budget.emails
  stopped_roles = concat(
    [for account, role in module.eks.pod_roles : role if account == "deployer"],
    local.stoppable_operators,
  )
  trainium_autoscaling_group = module.trainium.autoscaling_group
  trainium_max_nodes         = var.trainium.max_nodes
  zero_schedule              = var.zero_schedule
  denied_actions             = ["eks:UpdateNodegroupConfig", "eks:CreateNodegroup", "autoscaling:SetDesiredCapacity", "autoscaling:UpdateAutoScalingGroup"]
  idle_alarm                 = var.enable_addons ? var.idle_alarm : null
  job_queue_arns             = []
}
