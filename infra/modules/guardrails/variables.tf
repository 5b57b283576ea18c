variable "name" {
  description = "Of the cluster, and the beginning of the names of what is made."
  type        = string
}

variable "account" {
  type = object({ id = string, partition = string, region = string })
}

variable "key_arn" {
  type = string
}

variable "budget" {
  description = "Of the whole account, a month; null: none."
  type        = object({ monthly_dollars = number })
}

variable "emails" {
  description = "Who hears of alarms."
  type        = list(string)
}

variable "stopped_roles" {
  description = "Roles that bring up nodes, which the budget's action takes the right from."
  type        = list(object({ name = string, arn = string }))
}

variable "denied_actions" {
  description = "What a stopped role may not do: the calls by which nodes come up."
  type        = list(string)
}

variable "trainium_autoscaling_group" {
  description = "That the schedule lowers; null without one."
  type        = string
}

variable "zero_schedule" {
  description = "When the Trainium nodes go whatever runs on them; null: never."
  type        = object({ cron = string, time_zone = string })
}

variable "trainium_max_nodes" {
  description = "Of that group."
  type        = number
}

variable "idle_alarm" {
  description = "NeuronCores below so many percent for so long while nodes are up; null: no alarm."
  type        = object({ percent = number, minutes = number })
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds each role that is made; null: none."
  type        = string
}
