# Add-ons of EKS' catalogue, which AWS versions and removes with the cluster. infra/addons installs those that the catalogue
# lacks: KubeRay, Volcano, the device plugins, Prometheus. Left out are cert-manager, because no webhook needs its
# certificates; and the AWS Load Balancer Controller, because its resources outside of the state are what most often stops a
# destroy.

locals {
  before_nodes = {
    vpc-cni = {
      # By default the CNI takes all addresses of an interface and of a spare one: 98 on a trn1.32xlarge.
      env = {
        MINIMUM_IP_TARGET = tostring(var.trainium_pod_addresses.least)
        WARM_IP_TARGET    = tostring(var.trainium_pod_addresses.spare)
      }
      enableNetworkPolicy = "true" # otherwise nothing enforces the policies of k8s/base
    }
    kube-proxy             = {}
    eks-pod-identity-agent = {}
  }
  after_nodes = merge(
    {
      coredns                   = { nodeSelector = var.core_pool }
      metrics-server            = { nodeSelector = var.core_pool }
      aws-ebs-csi-driver        = { controller = { nodeSelector = var.core_pool } } # for the volume of Prometheus
      aws-fsx-csi-driver        = { controller = { nodeSelector = var.core_pool } }
      eks-node-monitoring-agent = {} # detects Neuron's faults; the node groups repair the nodes that it reports
    },
    var.enable_container_insights ? {
      amazon-cloudwatch-observability = {
        # Set explicitly, because only enhanced observability has the idle alarm's metric.
        agent = { config = { logs = { metrics_collected = { kubernetes = { enhanced_container_insights = true } } } } }
        containerLogs = merge({ enabled = length(var.pod_logs) > 0 }, length(var.pod_logs) > 0 ? {
          # The add-on's own files would send the logs of all pods and of the nodes' services.
          fluentBit = { config = { extraFiles = {
            "application-log.conf" = templatefile("${path.module}/fluent-bit.conf.tftpl", { pod_logs = var.pod_logs })
            "dataplane-log.conf"   = "# left out"
            "host-log.conf"        = "# left out"
          } } }
        } : {})
      }
    } : {},
  )
  # Service accounts and policies of add-ons that call AWS. A role's name has at most 64 letters, of which the stack and the
  # region take up to 40, so a short name stands for the add-on.
  addon_identities = {
    vpc-cni = { role = "cni", service_account = "aws-node", managed_policy = "AmazonEKS_CNI_Policy" }
    # The volume is static, so the driver reads its description and mounts it, but makes nothing.
    aws-fsx-csi-driver              = { role = "fsx-csi", service_account = "fsx-csi-controller-sa", managed_policy = null }
    aws-ebs-csi-driver              = { role = "ebs-csi", service_account = "ebs-csi-controller-sa", managed_policy = "service-role/AmazonEBSCSIDriverPolicy" }
    amazon-cloudwatch-observability = { role = "cloudwatch", service_account = "cloudwatch-agent", managed_policy = null }
  }
  used_identities = {
    for name, identity in local.addon_identities : name => identity
    if var.enable_addons && contains(keys(merge(local.before_nodes, local.after_nodes)), name)
  }
}

resource "aws_eks_addon" "before_nodes" {
  for_each                    = { for name, values in local.before_nodes : name => jsonencode(values) if var.enable_addons }
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = lookup(var.addon_versions, each.key, null)
  configuration_values        = each.value == "{}" ? null : each.value
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"

  dynamic "pod_identity_association" {
    for_each = contains(keys(local.used_identities), each.key) ? [local.used_identities[each.key]] : []
    content {
      role_arn        = aws_iam_role.addon[each.key].arn
      service_account = pod_identity_association.value.service_account
    }
  }

  depends_on = [aws_iam_role_policy_attachment.addon] # the CNI needs its rights to give pods addresses
}

resource "aws_eks_addon" "after_nodes" {
  for_each                    = { for name, values in local.after_nodes : name => jsonencode(values) if var.enable_addons }
  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  addon_version               = lookup(var.addon_versions, each.key, null)
  configuration_values        = each.value == "{}" ? null : each.value
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"

  dynamic "pod_identity_association" {
    for_each = contains(keys(local.used_identities), each.key) ? [local.used_identities[each.key]] : []
    content {
      role_arn        = aws_iam_role.addon[each.key].arn
      service_account = pod_identity_association.value.service_account
    }
  }

  # Add-ons become active once a node runs them, and some only with their rights.
  depends_on = [aws_eks_node_group.pool, aws_iam_role_policy_attachment.addon, aws_iam_role_policy.fsx_csi, aws_iam_role_policy.cloudwatch]
}

resource "aws_iam_role" "addon" {
  for_each             = local.used_identities
  name                 = "${var.name}-${var.account.region}-${each.value.role}"
  description          = "Add-on ${each.key}"
  permissions_boundary = var.permissions_boundary
  assume_role_policy   = local.pod_identity_trust
}

resource "aws_iam_role_policy_attachment" "addon" {
  for_each   = { for name, identity in local.used_identities : name => identity if identity.managed_policy != null }
  role       = aws_iam_role.addon[each.key].name
  policy_arn = "arn:${var.account.partition}:iam::aws:policy/${each.value.managed_policy}"
}

resource "aws_iam_role_policy" "fsx_csi" {
  count = contains(keys(local.used_identities), "aws-fsx-csi-driver") ? 1 : 0
  name  = "describe"
  role  = aws_iam_role.addon["aws-fsx-csi-driver"].id
  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = ["fsx:DescribeFileSystems"], Resource = ["*"] }]
  })
}

# Agent and Fluent Bit have one service account. CloudWatchAgentServerPolicy would let it make and write every log group of the
# account, and read parameters.
resource "aws_iam_role_policy" "cloudwatch" {
  count = contains(keys(local.used_identities), "amazon-cloudwatch-observability") ? 1 : 0
  name  = "write"
  role  = aws_iam_role.addon["amazon-cloudwatch-observability"].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect   = "Allow"
        Action   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
        Resource = [for arn in concat([var.metrics_log_group_arn], [for each in var.pod_logs : each.log_group_arn]) : "${arn}:*"]
      },
      {
        Effect    = "Allow"
        Action    = ["cloudwatch:PutMetricData"]
        Resource  = ["*"]
        Condition = { StringEquals = { "cloudwatch:namespace" = "ContainerInsights" } }
      },
      {
        Effect   = "Allow"
        Action   = ["ec2:DescribeTags", "ec2:DescribeVolumes", "logs:DescribeLogGroups"]
        Resource = ["*"]
      },
    ]
  })
}
