variable "name" {
  description = "Begins the names of what is made."
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
  description = "Refuse to destroy a bucket that is not empty."
  type        = bool
}

variable "log_retention_days" {
  type = number
}

variable "log_groups" {
  description = "Names of the target's own, beside those of the file system and the VPC's flow log."
  type        = map(string)
}

variable "fsx" {
  description = "Size and place of the file system; null: none is made."
  type = object({
    gib               = number
    throughput        = number
    subnet_id         = string
    security_group_id = string
  })
}

variable "enable_data_repository" {
  description = "Copy checkpoints from the file system to the bucket."
  type        = bool
}
