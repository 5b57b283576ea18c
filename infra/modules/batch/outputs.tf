output "queues" {
  description = "Names of the queues by pool."
  value       = { for pool, queue in aws_batch_job_queue.pool : pool => queue.name }
}

output "queue_arns" {
  description = "ARNs of the queues by pool."
  value       = { for pool, queue in aws_batch_job_queue.pool : pool => queue.arn }
}

output "job_roles" {
  description = "ARNs of the jobs' roles by stage."
  value       = { for stage, role in aws_iam_role.job : stage => role.arn }
}

output "execution_role" {
  description = "ARN of the execution role; null if containers get no secret."
  value       = one(aws_iam_role.execution[*].arn)
}

output "instance_profile" {
  description = "ARN of the instance profile."
  value       = local.instance_profile
}

output "security_group_ids" {
  value = local.security_group_ids
}

output "user_data" {
  description = "User data of the nodes by pool."
  value       = local.user_data
}
