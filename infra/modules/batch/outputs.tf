output "queues" {
  description = "Names by pool."
  value       = { for pool, queue in aws_batch_job_queue.pool : pool => queue.name }
}

output "job_roles" {
  description = "ARNs by stage."
  value       = { for stage, role in aws_iam_role.job : stage => role.arn }
}

output "execution_role" {
  description = "ARN; null where no secret is given to containers."
  value       = one(aws_iam_role.execution[*].arn)
}

output "instance_profile" {
  description = "ARN."
  value       = local.instance_profile
}

output "security_group_ids" {
  value = local.security_group_ids
}

output "user_data" {
  description = "What a node of each pool reads when it starts."
  value       = local.user_data
}
