# Variables of the EKS stack alone; those of both stacks are in common.tf.

variable "core_nodes" {
  description = "Instance type and number of the nodes that are always up, for the Ray head, the operators and the add-ons."
  type = object({
    shape = optional(string, "m7i.2xlarge")
    nodes = optional(number, 2)
  })
  default = {}

  validation {
    condition     = try(local.shapes[var.core_nodes.shape].neuron_devices == 0 && local.shapes[var.core_nodes.shape].gpus == 0, false)
    error_message = "core_nodes.shape = \"${var.core_nodes.shape}\": expected a type of infra/shapes.json without Neuron devices and GPUs: ${join(", ", [for name, shape in local.shapes : name if shape.neuron_devices == 0 && shape.gpus == 0])}."
  }

  validation {
    condition     = var.core_nodes.nodes >= 1
    error_message = "core_nodes.nodes = ${var.core_nodes.nodes}: expected 1 or more, because the Ray head and the operators need a node."
  }
}

variable "administrators" {
  description = "ARNs of the IAM roles and users that administer the cluster, beside the principal that applied this stack first and stays an administrator. A principal that applies it later is one only if listed here."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.administrators : can(regex("^arn:[a-z-]+:iam::[0-9]{12}:(role|user)/", arn))])
    error_message = "administrators = ${jsonencode(var.administrators)}: expected ARNs of roles or users, such as arn:aws:iam::111122223333:role/platform. For a session, name the role behind it."
  }
}

variable "api_public_cidrs" {
  description = "IPv4 blocks from which the internet reaches the Kubernetes API, such as 203.0.113.7/32. If empty, only the VPC reaches it."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.api_public_cidrs : can(cidrnetmask(cidr)) && cidr != "0.0.0.0/0"])
    error_message = <<-EOT
      api_public_cidrs = ${jsonencode(var.api_public_cidrs)}: expected blocks of your own addresses, not the whole internet. This command shows your address:
        curl https://checkip.amazonaws.com
    EOT
  }
}

variable "kubernetes_version" {
  description = "Minor version of Kubernetes. The stages are tested on 1.35, the newest that Volcano 1.15 supports; EKS ends its standard support on 2027-03-27."
  type        = string
  default     = "1.35"

  validation {
    condition     = contains(keys(local.eks_releases.versions), var.kubernetes_version)
    error_message = "kubernetes_version = \"${var.kubernetes_version}\": infra/aws_releases.json lists ${join(" and ", keys(local.eks_releases.versions))}. To add a version, write the end of its standard support there."
  }
}

variable "kubernetes_support" {
  description = "What EKS does once the version's standard support ends. EXTENDED, EKS' own default, keeps the version for 12 more months; from that day on the control plane costs $0.60 an hour instead of $0.10. With STANDARD EKS upgrades the cluster to the next version, which the stages may not be tested on."
  type        = string
  default     = "EXTENDED"

  validation {
    condition     = contains(["STANDARD", "EXTENDED"], var.kubernetes_support)
    error_message = "kubernetes_support = \"${var.kubernetes_support}\": expected STANDARD or EXTENDED."
  }
}

variable "addon_versions" {
  description = "Versions of EKS add-ons by name, in addition to those of infra/aws_releases.json. EKS chooses the version of any other add-on; make infra-preflight prints the line that pins it."
  type        = map(string)
  default     = {}
}

variable "ami_release" {
  description = "AMI release of the Trainium nodes, such as 20260505. null takes the default of infra/aws_releases.json for trainium.shape. The images accept the Neuron drivers of images/platforms.toml; make infra-up refuses a release with another."
  type        = string
  default     = null

  validation {
    condition     = var.ami_release == null ? true : contains(local.neuron_dates, var.ami_release)
    error_message = <<-EOT
      ami_release = "${coalesce(var.ami_release, "-")}" is not in infra/aws_releases.json, which lists for ${var.trainium.shape}: ${join(", ", local.neuron_dates)}.
      To add a release, look up its aws-neuronx-dkms of AL2023_x86_64_NEURON in ${local.eks_releases.look_up};
      the images accept the drivers of images/platforms.toml.
    EOT
  }
}

variable "cpu_ami_release" {
  description = "AMI release of the core and cpu nodes, such as 20260714. null takes the Trainium nodes' default. These nodes have no Neuron driver, so a newer release may be set for its patches."
  type        = string
  default     = null

  validation {
    condition     = var.cpu_ami_release == null ? true : can(regex("^[0-9]{8}$", var.cpu_ami_release))
    error_message = <<-EOT
      cpu_ami_release = "${coalesce(var.cpu_ami_release, "-")}": expected the date of a release, such as 20260505. It is the end of what this command shows, the newest:
        aws ssm get-parameter --region ${var.region} --name /aws/service/eks/optimized-ami/${var.kubernetes_version}/amazon-linux-2023/x86_64/standard/recommended/release_version --query Parameter.Value
    EOT
  }
}

variable "zero_schedule" {
  description = "Schedule that removes all Trainium nodes, whatever runs on them, such as { cron = \"0 20 * * FRI\", time_zone = \"Europe/Berlin\" }; null for none."
  type        = object({ cron = string, time_zone = optional(string, "Etc/UTC") })
  default     = null
}

variable "idle_alarm" {
  description = "Sends a mail to budget.emails once the NeuronCores of running nodes have been used less than this percentage for this many minutes; null for no alarm."
  type        = object({ percent = optional(number, 1), minutes = optional(number, 60) })
  default     = {}
}

variable "enable_pod_logs" {
  description = "Whether CloudWatch keeps the logs of the stages', the head's, the operators' and the CSI driver's pods for log_retention_days. It bills them by volume; the add-on that sends them also sends the metrics of Container Insights."
  type        = bool
  default     = true
}

# Each switch below leaves out a part that an account already has, or that a test cannot have.

variable "enable_fsx" {
  description = "Whether the stack makes the FSx for Lustre file system."
  type        = bool
  default     = true
}

variable "enable_addons" {
  description = "Whether the stack installs EKS' catalogue add-ons."
  type        = bool
  default     = true
}

variable "enable_pod_identity" {
  description = "Whether service accounts get IAM roles through EKS Pod Identity."
  type        = bool
  default     = true
}

variable "enable_access_entries" {
  description = "Whether operators get access entries of the cluster."
  type        = bool
  default     = true
}
