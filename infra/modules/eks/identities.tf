# AWS rights of the namespace's pods, by service account. Pod Identity's agent on each node gives them credentials, so no pod
# uses those of its node.

locals {
  pod_identity_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
      Condition = {
        StringEquals = { "aws:SourceAccount" = var.account.id }
        ArnLike      = { "aws:SourceArn" = local.cluster_arn }
      }
    }]
  })

  cluster_arn = "arn:${var.account.partition}:eks:${var.account.region}:${var.account.id}:cluster/${var.name}"
  node_group_arns = [
    for group in var.scaled_node_groups :
    "arn:${var.account.partition}:eks:${var.account.region}:${var.account.id}:nodegroup/${var.name}/${group}/*"
  ]

  # The tokenizer reads texts and a tokenizer file from the bucket. The compiler and the trainer use only the file system, so they
  # have no role; the network policies of k8s/base would not let them reach S3 either.
  bucket_policies = {
    for account in var.bucket_users : account => [
      {
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = [var.bucket_arn]
        Condition = { StringLike = { "s3:prefix" = ["${account}/*"] } }
      },
      {
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource = ["${var.bucket_arn}/${account}/*"]
      },
      {
        Effect    = "Allow"
        Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource  = [var.key_arn]
        Condition = { StringEquals = { "kms:ViaService" = "s3.${var.account.region}.amazonaws.com" } }
      },
    ]
  }
  # EKS has no condition key for the requested size, so the right to raise a group includes the right to lower it.
  node_scaler_policies = {
    for account in var.node_scalers : account => [
      {
        Effect   = "Allow"
        Action   = ["eks:DescribeNodegroup", "eks:UpdateNodegroupConfig"]
        Resource = local.node_group_arns
      },
    ]
  }
  # Two maps, because their lists differ in type, which one merge or conditional would refuse.
  policies = {
    for account, statements in merge(
      { for account, each in local.bucket_policies : account => jsonencode(each) },
      { for account, each in local.node_scaler_policies : account => jsonencode(each) },
    ) : account => statements if var.enable_pod_identity
  }
}

resource "aws_iam_role" "pod" {
  for_each             = local.policies
  name                 = "${var.name}-${var.account.region}-${each.key}"
  description          = "Service account ${each.key} of namespace ${var.namespace}"
  permissions_boundary = var.permissions_boundary
  assume_role_policy   = local.pod_identity_trust
  # The budget's action attaches a policy without terraform's knowledge. IAM deletes neither a role with a policy nor an attached
  # policy, so the roles are destroyed first.
  force_detach_policies = true
  depends_on            = [terraform_data.stop_policy]
}

resource "terraform_data" "stop_policy" {
  input = var.stop_policy_arn
}

resource "aws_iam_role_policy" "pod" {
  for_each = local.policies
  name     = "own"
  role     = aws_iam_role.pod[each.key].id
  policy   = jsonencode({ Version = "2012-10-17", Statement = jsondecode(each.value) })
}

resource "aws_eks_pod_identity_association" "pod" {
  for_each        = local.policies
  cluster_name    = aws_eks_cluster.this.name
  namespace       = var.namespace
  service_account = each.key
  role_arn        = aws_iam_role.pod[each.key].arn
}
