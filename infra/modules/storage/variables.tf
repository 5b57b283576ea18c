variable "name" {
  description = "Prefix of all resources' names."
  type        = string
}

variable "region" {
  type = string
}

variable "account_id" {
  type = string
}

variable "partition" {
  type = string
}

variable "keep_data" {
  description = "Whether Terraform refuses to destroy a bucket that is not empty."
  type        = bool
}

variable "log_retention_days" {
  type = number
}

variable "log_groups" {
  description = "The target's own log groups by key, in addition to those of the file system and the flow log."
  type        = map(string)
}

variable "fsx" {
  description = "Size and place of the file system; null for none."
  type = object({
    gib               = number
    throughput        = number
    subnet_id         = string
    security_group_id = string
  })
}

variable "enable_data_repository" {
  description = "Whether checkpoints and the records of runs are copied from the file system to the bucket."
  type        = bool
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of every role; null for none."
  type        = string
}
