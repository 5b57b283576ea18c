variable "name" {
  description = "Begins the names of what is made."
  type        = string
}

variable "region" {
  type = string
}

variable "cidr" {
  description = "Addresses of the VPC."
  type        = string
}

variable "zone_ids" {
  description = "The zone of every node first, then one more: EKS wants its control plane in two."
  type        = list(string)

  validation {
    condition     = length(var.zone_ids) == 2 && length(distinct(var.zone_ids)) == 2
    error_message = "zone_ids must be two different zone ids, the nodes' first; got ${jsonencode(var.zone_ids)}."
  }
}

variable "enable_interface_endpoints" {
  description = "Reach the AWS APIs that nodes use without the NAT gateway."
  type        = bool
}

variable "endpoints_of_target" {
  description = "Services that this target's nodes call beside those that all do."
  type        = set(string)
}

variable "uses_default_group" {
  description = "Containers may be in the VPC's default security group, so it lets them reach one another and HTTPS; else it lets nothing through."
  type        = bool
}

variable "flow_log" {
  description = "Log group for what the security groups refuse, which is encrypted already; null: no flow log."
  type        = object({ log_group_arn = string })
  default     = null
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds each role that is made; null: none."
  type        = string
}
