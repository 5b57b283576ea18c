variable "name" {
  description = "Prefix of all resources' names."
  type        = string
}

variable "region" {
  type = string
}

variable "cidr" {
  description = "IPv4 block of the VPC."
  type        = string
}

variable "zone_ids" {
  description = "Two zone ids: that of all nodes, and another one, because EKS requires two for its control plane."
  type        = list(string)

  validation {
    condition     = length(var.zone_ids) == 2 && length(distinct(var.zone_ids)) == 2
    error_message = "zone_ids = ${jsonencode(var.zone_ids)}: expected two different zone ids, the nodes' zone first."
  }
}

variable "enable_interface_endpoints" {
  description = "Whether nodes reach the AWS APIs through interface endpoints instead of the NAT gateway."
  type        = bool
}

variable "endpoints_of_target" {
  description = "AWS services that only this target's nodes call, for interface endpoints."
  type        = set(string)
}

variable "uses_default_group" {
  description = "Whether containers may be in the VPC's default security group, which then admits traffic among them and HTTPS; otherwise it admits nothing."
  type        = bool
}

variable "flow_log" {
  description = "Encrypted log group of the flow log of rejected traffic; null for no flow log."
  type        = object({ log_group_arn = string })
  default     = null
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of every role; null for none."
  type        = string
}
