resource "aws_eks_cluster" "this" {
  name     = var.name
  version  = var.kubernetes_version
  role_arn = aws_iam_role.cluster.arn

  bootstrap_self_managed_addons = false # otherwise a CNI with default settings is installed before the add-on
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = false # otherwise EKS makes an access entry outside the state, and refuses a second one
  }

  # EXTENDED keeps the version after its standard support, for six times the price; STANDARD upgrades the cluster then.
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

# No switch leaves these out, because the principal that applies the stack first installs the add-ons. It stays an administrator
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
  # EKS accepts one entry per principal.
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

# Operators belong to a Kubernetes group, to which k8s/ gives what deployments need; they are not administrators.
resource "aws_eks_access_entry" "operator" {
  for_each          = var.enable_access_entries ? local.other_operators : toset([])
  cluster_name      = aws_eks_cluster.this.name
  principal_arn     = each.value
  kubernetes_groups = [var.operators_group]
}
