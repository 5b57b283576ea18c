output "key_arn" {
  value = aws_kms_key.this.arn
}

output "bucket" {
  value = { name = aws_s3_bucket.this.id, arn = aws_s3_bucket.this.arn }
}

output "fsx" {
  description = "The file system; its attributes are null if the module makes none."
  value = {
    id         = one(aws_fsx_lustre_file_system.this[*].id)
    dns_name   = one(aws_fsx_lustre_file_system.this[*].dns_name)
    mount_name = one(aws_fsx_lustre_file_system.this[*].mount_name)
  }
}

output "log_group_arns" {
  value = { for name, group in aws_cloudwatch_log_group.this : name => group.arn }
}

output "log_groups" {
  description = "Names of the log groups by key."
  value       = { for name, group in aws_cloudwatch_log_group.this : name => group.name }
}
