# AWS rights: a node joins ECS, pulls images and writes logs; the tokenizer uses its prefix of the bucket.

locals {
  task_trust = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ecs-tasks.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = var.account.id } }
    }]
  })

  makes_instance_role = var.instance_profile == null
  instance_profile = (
    local.makes_instance_role ? aws_iam_instance_profile.instance[0].arn :
    startswith(var.instance_profile, "arn:") ? var.instance_profile :
    "arn:${var.account.partition}:iam::${var.account.id}:instance-profile/${var.instance_profile}"
  )
  secrets = compact([var.hugging_face_secret, var.webhook_secret])

  instance_policies = local.makes_instance_role ? toset([
    "service-role/AmazonEC2ContainerServiceforEC2Role", # the agent, ECR and the log driver
    "AmazonSSMManagedInstanceCore",                     # a shell on a node without SSH
  ]) : toset([])
}

resource "aws_iam_role" "instance" {
  count                = local.makes_instance_role ? 1 : 0
  name                 = "${var.name}-${var.account.region}-node"
  description          = "Nodes of Batch"
  permissions_boundary = var.permissions_boundary
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "instance" {
  for_each   = local.instance_policies
  role       = aws_iam_role.instance[0].name
  policy_arn = "arn:${var.account.partition}:iam::aws:policy/${each.value}"
}

resource "aws_iam_instance_profile" "instance" {
  count = local.makes_instance_role ? 1 : 0
  name  = "${var.name}-${var.account.region}-node"
  role  = aws_iam_role.instance[0].name
}

# Every stage has a role, so that none uses its node's rights. The roles of the compiler and the trainer allow nothing, because
# these stages use only the file system.
resource "aws_iam_role" "job" {
  for_each             = var.stages
  name                 = "${var.name}-${var.account.region}-${each.key}"
  description          = "Jobs of the ${each.key}"
  permissions_boundary = var.permissions_boundary
  assume_role_policy   = local.task_trust
}

resource "aws_iam_role_policy" "job" {
  for_each = var.bucket_users
  name     = "own"
  role     = aws_iam_role.job[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = [var.bucket_arn]
        Condition = { StringLike = { "s3:prefix" = ["${each.key}/*"] } }
      },
      {
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource = ["${var.bucket_arn}/${each.key}/*"]
      },
      {
        Effect    = "Allow"
        Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource  = [var.key_arn]
        Condition = { StringEquals = { "kms:ViaService" = "s3.${var.account.region}.amazonaws.com" } }
      },
    ]
  })
}

# If there is an execution role, the agent also uses it for images and logs, instead of the node's.
resource "aws_iam_role" "execution" {
  count                = length(local.secrets) == 0 ? 0 : 1
  name                 = "${var.name}-${var.account.region}-execution"
  description          = "Gives secrets to containers when ECS starts them"
  permissions_boundary = var.permissions_boundary
  assume_role_policy   = local.task_trust
}

resource "aws_iam_role_policy_attachment" "execution" {
  count      = length(local.secrets) == 0 ? 0 : 1
  role       = aws_iam_role.execution[0].name
  policy_arn = "arn:${var.account.partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

resource "aws_iam_role_policy" "execution" {
  count = length(local.secrets) == 0 ? 0 : 1
  name  = "secrets"
  role  = aws_iam_role.execution[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["secretsmanager:GetSecretValue"]
      Resource = local.secrets
    }]
  })
}
