# `make infra-up STACK=batch` writes the output `config` to deploy/batch/config.txt, which deployments read.

output "config" {
  description = "The lines KEY=VALUE of a config.txt. The first seven keys are those that the variable config accepts."
  value = join("", [
    for pair in [
      ["REGION", var.region],
      ["SUBNET", local.subnets.trainium],
      ["SG", join(",", module.batch.security_group_ids)],
      ["ECR_REPO", local.image_repository],
      ["INSTANCE_ROLE", module.batch.instance_profile],
      ["FSX_DNS_NAME", local.file_system.dns_name],
      ["MOUNT_NAME", local.file_system.mount_name],
      ["NAME", var.name],
      ["TRAINIUM_QUEUE", module.batch.queues.trainium],
      ["TRAINIUM_SHAPE", var.trainium.shape],
      ["TRAINIUM_MAX_NODES", var.trainium.max_nodes],
      ["CPU_QUEUE", module.batch.queues.cpu],
      ["CPU_SHAPE", var.cpu_nodes.shape],
      ["CPU_MAX_NODES", var.cpu_nodes.max_nodes],
      ["LOG_GROUP_TOKENIZER", module.storage.log_groups["tokenizer"]],
      ["LOG_GROUP_COMPILER", module.storage.log_groups["compiler"]],
      ["LOG_GROUP_TRAINER", module.storage.log_groups["trainer"]],
      ["JOB_ROLE_TOKENIZER", module.batch.job_roles["tokenizer"]],
      ["JOB_ROLE_COMPILER", module.batch.job_roles["compiler"]],
      ["JOB_ROLE_TRAINER", module.batch.job_roles["trainer"]],
      ["CAPACITY_ENDS_AT", var.capacity.ends_at],
      ["CHECKPOINT_GB", var.checkpoint_gb],
      ["NOTICE_SECONDS", local.notice_seconds],
      ["HF_TOKEN_SECRET", var.hugging_face_secret == null ? "" : var.hugging_face_secret],
      ["WEBHOOK_SECRET", var.webhook_secret == null ? "" : var.webhook_secret],
      ["EXECUTION_ROLE", module.batch.execution_role == null ? "" : module.batch.execution_role],
    ] : "${pair[0]}=${pair[1]}\n"
  ])
}

output "region" {
  value = var.region
}

output "zone_id" {
  value = var.zone_id
}

output "bucket" {
  value = module.storage.bucket.name
}

output "fsx_id" {
  description = "Id of the file system; empty for an existing one."
  value       = local.makes_file_system ? module.storage.fsx.id : ""
}

output "queues" {
  description = "Names of the queues by pool."
  value       = module.batch.queues
}

output "repositories" {
  description = "Names of the repositories by image; empty for an existing registry."
  value       = local.makes_registry ? module.registry[0].repositories : {}
}

output "capacity_ends_at" {
  value = var.capacity.ends_at
}

output "addresses_per_node" {
  description = "Number of addresses that a node takes in the Trainium subnet."
  value       = local.addresses_per_node
}
