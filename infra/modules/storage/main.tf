locals {
  bucket = "${var.name}-${var.account_id}-${var.region}" # unique among all accounts
  # Folders of the file system that the bucket has as well, and when their files are copied.
  exported_folders = { checkpoint = "at once", run = "hourly" }
}

# One key for the bucket, the file system, node volumes, images, Kubernetes' Secrets and logs. Stages may use it only through S3
# (modules/eks), where they are limited to their prefix of the bucket.
resource "aws_kms_key" "this" {
  description             = "All data of ${var.name} at rest"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "Account"
        Effect    = "Allow"
        Principal = { AWS = "arn:${var.partition}:iam::${var.account_id}:root" }
        Action    = "kms:*"
        Resource  = "*"
      },
      {
        # Auto Scaling starts nodes under a service-linked role. An account that has never had that role refuses a key policy
        # with its name, so the policy names the calling service, like that of AWS' own key for EBS.
        Sid       = "NodeVolumes"
        Effect    = "Allow"
        Principal = { AWS = "*" }
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:CreateGrant", "kms:DescribeKey"]
        Resource  = "*"
        Condition = {
          StringEquals = { "kms:CallerAccount" = var.account_id, "kms:ViaService" = "ec2.${var.region}.amazonaws.com" }
        }
      },
      {
        # The file system writes to the bucket under a role whose name contains the file system's id. The file system needs
        # the key first, so the policy has only the prefix of the name.
        Sid       = "DataRepository"
        Effect    = "Allow"
        Principal = { AWS = "*" }
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
        Resource  = "*"
        Condition = {
          StringEquals = { "kms:CallerAccount" = var.account_id, "kms:ViaService" = "s3.${var.region}.amazonaws.com" }
          ArnLike = {
            "aws:PrincipalArn" = "arn:${var.partition}:iam::${var.account_id}:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_*"
          }
        }
      },
      {
        Sid       = "Logs"
        Effect    = "Allow"
        Principal = { Service = "logs.${var.region}.amazonaws.com" }
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
        Resource  = "*"
        Condition = {
          ArnLike = { "kms:EncryptionContext:aws:logs:arn" = "arn:${var.partition}:logs:${var.region}:${var.account_id}:*" }
        }
      },
      {
        Sid       = "Alerts"
        Effect    = "Allow"
        Principal = { Service = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com", "events.amazonaws.com"] }
        Action    = ["kms:Decrypt", "kms:GenerateDataKey*"]
        Resource  = "*"
        Condition = { StringEquals = { "aws:SourceAccount" = var.account_id } }
      },
    ]
  })
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}

resource "aws_s3_bucket" "this" {
  bucket        = local.bucket
  force_destroy = !var.keep_data
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id
  rule {
    bucket_key_enabled = true # one KMS call for many objects
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

# A checkpoint that is deleted on the file system is also deleted here; its version stays for a week. Llama 2 7B on four nodes
# deletes 2.7 TB of older checkpoints a day, whose versions cost $15.
resource "aws_s3_bucket_versioning" "this" {
  bucket = aws_s3_bucket.this.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id
  rule {
    id     = "old-versions-and-broken-uploads"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = 7
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
  depends_on = [aws_s3_bucket_versioning.this]
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OnlyTls"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })
  depends_on = [aws_s3_bucket_public_access_block.this]
}

resource "aws_fsx_lustre_file_system" "this" {
  count                           = var.fsx == null ? 0 : 1
  deployment_type                 = "PERSISTENT_2"
  file_system_type_version        = "2.15"
  storage_type                    = "SSD"
  storage_capacity                = var.fsx.gib
  per_unit_storage_throughput     = var.fsx.throughput
  data_compression_type           = "LZ4"
  kms_key_id                      = aws_kms_key.this.arn
  subnet_ids                      = [var.fsx.subnet_id]
  security_group_ids              = [var.fsx.security_group_id]
  automatic_backup_retention_days = 0 # a file system with a data repository cannot have backups; the bucket is the copy
  skip_final_backup               = true
  log_configuration {
    level       = "WARN_ERROR"
    destination = aws_cloudwatch_log_group.this["fsx"].arn
  }
  tags = { Name = var.name }
}

# Copies folders of the file system to the bucket, and restores them into a new file system. Not the whole root, because corpora
# and compile caches can be made again from a recipe.
#
# A checkpoint's files never change, so each is uploaded once, at once. The files of a run change with each step (a record) and
# every two seconds (the heartbeat of each worker), and each change would be an upload, and for each a version of the whole file,
# kept for a week. So the schedule below copies them.
resource "aws_fsx_data_repository_association" "this" {
  for_each                         = var.fsx != null && var.enable_data_repository ? local.exported_folders : {}
  file_system_id                   = aws_fsx_lustre_file_system.this[0].id
  file_system_path                 = "/${each.key}"
  data_repository_path             = "s3://${aws_s3_bucket.this.id}/${each.key}"
  batch_import_meta_data_on_create = true
  delete_data_in_filesystem        = false

  dynamic "s3" {
    for_each = each.value == "at once" ? [each.value] : []
    content {
      auto_export_policy {
        events = ["NEW", "CHANGED", "DELETED"]
      }
    }
  }
  depends_on = [aws_s3_bucket_server_side_encryption_configuration.this]
}

# A task uploads all files that changed since the previous task, and costs its S3 requests alone. Of metrics.jsonl, which grows
# by every step, an hour's interval leaves 168 versions in the bucket's week.
resource "aws_scheduler_schedule" "export" {
  for_each            = { for folder, association in aws_fsx_data_repository_association.this : folder => association if local.exported_folders[folder] == "hourly" }
  name                = "${var.name}-export-${each.key}"
  description         = "Copies the folder ${each.key} of the file system to the bucket"
  schedule_expression = "rate(1 hours)"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = "arn:${var.partition}:scheduler:::aws-sdk:fsx:createDataRepositoryTask"
    role_arn = aws_iam_role.export[0].arn
    input = jsonencode({
      Type         = "EXPORT_TO_REPOSITORY"
      FileSystemId = aws_fsx_lustre_file_system.this[0].id
      Paths        = [each.key]
      Report       = { Enabled = false }
    })
    retry_policy {
      maximum_retry_attempts = 0 # the next hour's task copies everything that this one left
    }
  }
}

resource "aws_iam_role" "export" {
  count                = length(aws_fsx_data_repository_association.this) > 0 ? 1 : 0
  name                 = "${var.name}-${var.region}-export"
  description          = "Starts exports of the file system to the bucket"
  permissions_boundary = var.permissions_boundary
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "scheduler.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = var.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "export" {
  count = length(aws_iam_role.export)
  name  = "export"
  role  = aws_iam_role.export[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect = "Allow"
      Action = ["fsx:CreateDataRepositoryTask"]
      Resource = [
        aws_fsx_lustre_file_system.this[0].arn,
        "arn:${var.partition}:fsx:${var.region}:${var.account_id}:task/*",
      ]
    }]
  })
}

resource "aws_cloudwatch_log_group" "this" {
  for_each = merge(var.log_groups, {
    fsx  = "/aws/fsx/${var.name}" # FSx accepts no other prefix
    flow = "/${var.name}/flow"
  })
  name              = each.value
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.this.arn
}
