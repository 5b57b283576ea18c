variable "name" {
  description = "Name of the cluster, and prefix of all resources' names."
  type        = string
}

variable "account" {
  type = object({ id = string, partition = string, region = string })
}

variable "key_arn" {
  type = string
}

variable "budget" {
  description = "Monthly budget of the whole account; null for none."
  type        = object({ monthly_dollars = number })
}

variable "emails" {
  description = "Mail addresses that get the alarms."
  type        = list(string)
}

variable "stopped_roles" {
  description = "Roles that start nodes, from which the budget's action takes that right."
  type        = list(object({ name = string, arn = string }))
}

variable "denied_actions" {
  description = "API calls that start nodes, which a stopped role may not make."
  type        = list(string)
}

variable "trainium_autoscaling_group" {
  description = "Auto Scaling group that the schedule scales to 0; null without one."
  type        = string
}

variable "zero_schedule" {
  description = "Schedule that removes all Trainium nodes, whatever runs on them; null for none."
  type        = object({ cron = string, time_zone = string })
}

variable "trainium_max_nodes" {
  description = "Maximum size of the Auto Scaling group."
  type        = number
}

variable "idle_alarm" {
  description = "Threshold in percent and duration in minutes of the alarm for idle NeuronCores; null for no alarm."
  type        = object({ percent = number, minutes = number })
}

variable "job_queue_arns" {
  description = "ARNs of Batch's queues, about whose jobs the topic tells; empty without Batch."
  type        = list(string)
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of every role; null for none."
  type        = string
}
