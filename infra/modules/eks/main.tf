resource "aws_eks_cluster" "this" {
  name     = var.name
  version  = var.kubernetes_version
  role_arn = aws_iam_role.cluster.arn

  bootstrap_self_managed_addons = false # else the CNI of the day is there before the add-on with our settings
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = false # else an entry that is not in the state, and that no list may have again
  }

  # Extended support costs six times as much an hour, and begins by itself unless this says STANDARD: then EKS upgrades.
  upgrade_policy {
    support_type = var.kubernetes_support
  }

  vpc_config {
    subnet_ids              = var.network.control_plane_subnet_ids
    endpoint_private_access = true
    endpoint_public_access  = length(var.api_public_cidrs) > 0
    public_access_cidrs     = length(var.api_public_cidrs) > 0 ? var.api_public_cidrs : null
  }

  encryption_config {
    resources = ["secrets"]
    provider {
      key_arn = var.key_arn
    }
  }

  depends_on = [aws_iam_role_policy_attachment.cluster, terraform_data.log_groups]
}

resource "terraform_data" "log_groups" {
  input = var.log_group_arns
}

resource "aws_iam_role" "cluster" {
  name                 = "${var.name}-${var.account.region}-cluster"
  description          = "EKS' control plane"
  permissions_boundary = var.permissions_boundary
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:${var.account.partition}:iam::aws:policy/AmazonEKSClusterPolicy"
}

# Who applies the stack first installs the add-ons, so these are never left out by a switch. That one stays an administrator
# whoever applies later: an entry that followed the caller would take the cluster from its former administrator.
resource "aws_eks_access_entry" "creator" {
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = var.caller_arn

  lifecycle {
    ignore_changes = [principal_arn]
  }
}

resource "aws_eks_access_policy_association" "creator" {
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = aws_eks_access_entry.creator.principal_arn
  policy_arn    = local.administrator_policy_arn

  access_scope {
    type = "cluster"
  }
}

locals {
  administrator_policy_arn = "arn:${var.account.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  # EKS takes one entry a principal.
  other_administrators = setsubtract(var.administrators, [aws_eks_access_entry.creator.principal_arn])
  other_operators      = setsubtract(var.operators, concat(var.administrators, [aws_eks_access_entry.creator.principal_arn]))
}

resource "aws_eks_access_entry" "administrator" {
  for_each      = local.other_administrators
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value
}

resource "aws_eks_access_policy_association" "administrator" {
  for_each      = aws_eks_access_entry.administrator
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value.principal_arn
  policy_arn    = local.administrator_policy_arn

  access_scope {
    type = "cluster"
  }
}

# For people who deploy: in Kubernetes they are a group that k8s/ gives what a deployment needs, and no administrators.
resource "aws_eks_access_entry" "operator" {
  for_each          = var.enable_access_entries ? local.other_operators : toset([])
  cluster_name      = aws_eks_cluster.this.name
  principal_arn     = each.value
  kubernetes_groups = [var.operators_group]
}
