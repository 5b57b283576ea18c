variable "name" {
  description = "Prefix of all resources' names."
  type        = string
}

variable "vpc_id" {
  type = string
}
