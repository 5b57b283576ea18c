variable "name" {
  description = "Of the cluster, and the beginning of the names of what is made."
  type        = string
}

variable "account" {
  description = "Where it is made; identities are written for these nodes and no others."
  type        = object({ id = string, partition = string, region = string })
}

variable "kubernetes_version" {
  type = string
}

variable "kubernetes_support" {
  description = "STANDARD or EXTENDED, as EKS' upgrade policy has it."
  type        = string
}

variable "ami_release" {
  description = "Release of the pools' AMI, such as 1.34.7-20260505."
  type        = string
}

variable "api_public_cidrs" {
  description = "Who reaches the API from outside of the VPC; empty: nobody."
  type        = list(string)
}

variable "network" {
  type = object({
    control_plane_subnet_ids = list(string)
    nodes_subnet_id          = string
    fsx_security_group_id    = string
    routes                   = any
  })
}

variable "key_arn" {
  type = string
}

variable "log_group_arns" {
  description = "ARNs of the log groups of the control plane and of Container Insights, which are made without retention where they are not there before."
  type        = list(string)
}

variable "pools" {
  description = "Managed node groups without EFA, by name."
  type = map(object({
    shape      = string
    nodes      = number # at the start; what changes it afterwards keeps its word
    min_nodes  = number
    max_nodes  = number
    volume_gib = number
    labels     = map(string)
  }))
}

variable "core_pool" {
  description = "The pool of those add-ons that are no daemon of every node, as a label of its nodes."
  type        = map(string)
}

variable "trainium_pod_addresses" {
  description = "Addresses that the CNI holds ready on a node for pods."
  type        = object({ least = number, spare = number })
}

variable "caller_arn" {
  description = "IAM principal that applies: the first one stays an administrator of the cluster."
  type        = string
}

variable "administrators" {
  description = "IAM principals that may do everything in the cluster, too."
  type        = list(string)
}

variable "operators" {
  description = "IAM principals that deploy."
  type        = list(string)
}

variable "operators_group" {
  description = "The Kubernetes group that they are in, which k8s/ binds to what a deployment needs."
  type        = string
}

variable "bucket_arn" {
  type = string
}

variable "namespace" {
  type = string
}

variable "bucket_users" {
  description = "Service accounts that may use the prefix of their name in the bucket."
  type        = set(string)
}

variable "node_scalers" {
  description = "Service accounts that may change how many nodes a group has."
  type        = set(string)
}

variable "scaled_node_groups" {
  description = "Names of those groups."
  type        = list(string)
}

variable "stop_policy_arn" {
  description = "A policy that others attach to roles of service accounts, which outlives these; null: none."
  type        = string
  default     = null
}

variable "addon_versions" {
  description = "Pins, by add-on; without one EKS takes its default for the version of Kubernetes."
  type        = map(string)
}

variable "enable_addons" {
  type = bool
}

variable "enable_container_insights" {
  description = "The add-on that sends NeuronCore utilisation to CloudWatch."
  type        = bool
}

variable "enable_pod_identity" {
  type = bool
}

variable "enable_access_entries" {
  type = bool
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds each role that is made; null: none."
  type        = string
}
