# Variables of the Batch stack alone; those of both stacks are in common.tf.

variable "config" {
  description = "Path of a config.txt. Each of SUBNET, SG, ECR_REPO, INSTANCE_ROLE, FSX_DNS_NAME and MOUNT_NAME that has a value there exists already and is used instead of a new resource. null makes everything."
  type        = string
  default     = null

  validation {
    condition     = var.config == null ? true : fileexists(var.config)
    error_message = "config = \"${coalesce(var.config, "-")}\": no such file. Expected a file of KEY=VALUE lines, such as SUBNET=subnet-0123456789abcdef0; a relative path begins in the stack's folder."
  }
}

variable "checkpoint_gb" {
  description = "Size in 10^9 bytes of the largest checkpoint that a trainer commits when it is stopped: 12 for each 10^9 parameters, 157 for Llama 2 13B. The nodes' stop timeout follows from it and from fsx. Deployments with a larger checkpoint are refused."
  type        = number
  default     = 157

  validation {
    condition     = var.checkpoint_gb > 0
    error_message = "checkpoint_gb = ${var.checkpoint_gb}: expected more than 0, namely 12 for each 10^9 parameters."
  }
}

variable "queue_limits" {
  description = "Seconds after which Batch cancels the job at the head of a queue: capacity_seconds while EC2 has no capacity, misconfiguration_seconds if no node could ever hold the job."
  type = object({
    capacity_seconds         = optional(number, 7200)
    misconfiguration_seconds = optional(number, 600)
  })
  default = {}

  validation {
    condition = alltrue([
      for seconds in values(var.queue_limits) : seconds >= 600 && seconds <= 86400 && floor(seconds) == seconds
    ])
    error_message = "queue_limits = ${jsonencode(var.queue_limits)}: Batch accepts whole seconds from 600 to 86400."
  }
}

variable "hugging_face_secret" {
  description = "ARN of a secret in Secrets Manager, encrypted with AWS' own key, whose whole value is a Hugging Face token for gated texts and tokenizers; null for none."
  type        = string
  default     = null

  validation {
    condition     = var.hugging_face_secret == null ? true : can(regex("^arn:[a-z-]+:secretsmanager:${var.region}:[0-9]{12}:secret:.+$", var.hugging_face_secret))
    error_message = <<-EOT
      hugging_face_secret = "${coalesce(var.hugging_face_secret, "-")}": expected the ARN of a secret in ${var.region}. This command makes one:
        aws secretsmanager create-secret --region ${var.region} --name hugging-face --secret-string file://token --query ARN
    EOT
  }
}

variable "webhook_secret" {
  description = "ARN of a secret in Secrets Manager, encrypted with AWS' own key, whose whole value is the URL of the webhook that gets the stages' notices; null for none. Terraform never reads the value."
  type        = string
  default     = null

  validation {
    condition     = var.webhook_secret == null ? true : can(regex("^arn:[a-z-]+:secretsmanager:${var.region}:[0-9]{12}:secret:.+$", var.webhook_secret))
    error_message = <<-EOT
      webhook_secret: expected the ARN of a secret in ${var.region}, and not the URL itself. This command makes one:
        aws secretsmanager create-secret --region ${var.region} --name notices --secret-string file://webhook --query ARN
    EOT
  }
}

variable "ami_id" {
  description = "Id of the Trainium nodes' AMI, whose name has to be in infra/aws_releases.json. null takes the default of that table for trainium.shape. The images accept the Neuron drivers of images/platforms.toml; make infra-preflight refuses an AMI with another."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null ? true : can(regex("^ami-[0-9a-f]+$", var.ami_id))
    error_message = <<-EOT
      ami_id = "${coalesce(var.ami_id, "-")}": expected the id of an image. Leave it out to use ${local.default_ami},
      whose id in your region this command shows:
        aws ec2 describe-images --region ${var.region} --owners amazon --include-deprecated --filters Name=name,Values=${local.default_ami} --query 'Images[].ImageId'
    EOT
  }
}
