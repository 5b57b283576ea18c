variable "name" {
  description = "Name of the cluster, and prefix of all resources' names."
  type        = string
}

variable "account" {
  description = "Account, partition and region of the stack, which limit the roles' policies."
  type        = object({ id = string, partition = string, region = string })
}

variable "kubernetes_version" {
  type = string
}

variable "kubernetes_support" {
  description = "EKS' upgrade policy after standard support, STANDARD or EXTENDED."
  type        = string
}

variable "ami_release" {
  description = "AMI release of the pools' nodes, such as 1.35.4-20260505."
  type        = string
}

variable "api_public_cidrs" {
  description = "IPv4 blocks from which the internet reaches the Kubernetes API; empty for none."
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
  description = "ARNs of the log groups of the control plane and of Container Insights. They have to exist first, because AWS would make them without retention."
  type        = list(string)
}

variable "pools" {
  description = "Managed node groups without EFA, by name."
  type = map(object({
    shape      = string
    nodes      = number # the first size; later changes stay
    min_nodes  = number
    max_nodes  = number
    volume_gib = number
    labels     = map(string)
  }))
}

variable "core_pool" {
  description = "Label of the nodes on which add-ons run that are no DaemonSets."
  type        = map(string)
}

variable "trainium_pod_addresses" {
  description = "Addresses that the CNI keeps ready on a node for pods."
  type        = object({ least = number, spare = number })
}

variable "caller_arn" {
  description = "ARN of the IAM principal that applies. The first one stays an administrator of the cluster."
  type        = string
}

variable "administrators" {
  description = "ARNs of further IAM principals that administer the cluster."
  type        = list(string)
}

variable "operators" {
  description = "ARNs of the IAM principals that deploy stages."
  type        = list(string)
}

variable "operators_group" {
  description = "Kubernetes group of the operators, to which k8s/ gives what deployments need."
  type        = string
}

variable "bucket_arn" {
  type = string
}

variable "namespace" {
  type = string
}

variable "bucket_users" {
  description = "Service accounts that may use the prefix with their name in the bucket."
  type        = set(string)
}

variable "node_scalers" {
  description = "Service accounts that may change the sizes of scaled_node_groups."
  type        = set(string)
}

variable "scaled_node_groups" {
  description = "Names of the node groups that node_scalers may change."
  type        = list(string)
}

variable "stop_policy_arn" {
  description = "ARN of a policy that the budget's action attaches to service accounts' roles, and that is destroyed after them; null for none."
  type        = string
  default     = null
}

variable "addon_versions" {
  description = "Pinned versions by add-on. EKS chooses the version of any other add-on."
  type        = map(string)
}

variable "enable_addons" {
  type = bool
}

variable "enable_container_insights" {
  description = "Whether the add-on is installed that sends NeuronCore utilisation and the logs of pod_logs to CloudWatch."
  type        = bool
}

variable "metrics_log_group_arn" {
  description = "ARN of the log group of Container Insights' metrics; null without the add-on."
  type        = string
  default     = null
}

variable "pod_logs" {
  description = "Log groups of pods' logs by key, with patterns of the files below /var/log/containers on the nodes, whose names are POD_NAMESPACE_CONTAINER-ID.log; empty if no logs are sent."
  type = map(object({
    log_group      = string
    log_group_arn  = string
    files          = list(string)
    excluded_files = list(string)
  }))
}

variable "enable_pod_identity" {
  type = bool
}

variable "enable_access_entries" {
  type = bool
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of every role; null for none."
  type        = string
}

variable "tags" {
  description = "Tags of instances, volumes and interfaces, which do not get the provider's default tags."
  type        = map(string)
}
