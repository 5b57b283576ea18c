variable "name" {
  description = "Begins the names of what is made."
  type        = string
}

variable "vpc_id" {
  type = string
}
