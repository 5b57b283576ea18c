locals {
  bucket = "${var.name}-${var.account_id}-${var.region}" # unique among all accounts
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
        Principal = { Service = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"] }
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

# Copies checkpoints, with their manifests, to the bucket, and restores them into a new file system. Not the whole root: corpora
# and compile caches can be made again from a recipe, and heartbeats and metrics in run/ change every few seconds, which would
# be an upload each time.
resource "aws_fsx_data_repository_association" "this" {
  for_each                         = var.fsx != null && var.enable_data_repository ? toset(["checkpoint"]) : toset([])
  file_system_id                   = aws_fsx_lustre_file_system.this[0].id
  file_system_path                 = "/${each.value}"
  data_repository_path             = "s3://${aws_s3_bucket.this.id}/${each.value}"
  batch_import_meta_data_on_create = true
  delete_data_in_filesystem        = false
  s3 {
    auto_export_policy {
      events = ["NEW", "CHANGED", "DELETED"]
    }
  }
  depends_on = [aws_s3_bucket_server_side_encryption_configuration.this]
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
