# Three guards against unintended costs, because none is sufficient: a budget counts all costs, but hours later; an alarm notices
# within minutes that nothing computes; a schedule is always on time, but notices nothing.

resource "aws_sns_topic" "this" {
  name              = "${var.name}-alerts"
  kms_master_key_id = var.key_arn
}

resource "aws_sns_topic_policy" "this" {
  arn = aws_sns_topic.this.arn
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [{
        Effect    = "Allow"
        Action    = "sns:Publish"
        Principal = { Service = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"] }
        Resource  = aws_sns_topic.this.arn
        Condition = { StringEquals = { "aws:SourceAccount" = var.account.id } }
      }],
      # Its own statement: of a topic's conditions EventBridge knows only the ARN of the rule.
      [for rule in aws_cloudwatch_event_rule.job : {
        Effect    = "Allow"
        Action    = "sns:Publish"
        Principal = { Service = ["events.amazonaws.com"] }
        Resource  = aws_sns_topic.this.arn
        Condition = { ArnEquals = { "aws:SourceArn" = rule.arn } }
      }],
    )
  })
}

# Notices about Batch's jobs, also of one whose container was killed with its node and tells nobody. A job that is tried again
# becomes RUNNABLE again, and has failed only after its last attempt.
locals {
  job_notices = {
    started = { status = "RUNNING", text = "started" }
    done    = { status = "SUCCEEDED", text = "done" }
    ended   = { status = "FAILED", text = "ended early" }
  }
}

resource "aws_cloudwatch_event_rule" "job" {
  for_each    = { for key, notice in local.job_notices : key => notice if length(var.job_queue_arns) > 0 }
  name        = "${var.name}-job-${each.key}"
  description = "Jobs of ${var.name}'s queues that have ${each.key}"
  event_pattern = jsonencode({
    source      = ["aws.batch"]
    detail-type = ["Batch Job State Change"]
    detail      = { status = [each.value.status], jobQueue = var.job_queue_arns }
  })
}

resource "aws_cloudwatch_event_target" "job" {
  for_each = aws_cloudwatch_event_rule.job
  rule     = each.value.name
  arn      = aws_sns_topic.this.arn

  input_transformer {
    input_paths = { name = "$.detail.jobName", id = "$.detail.jobId", reason = "$.detail.statusReason" }
    input_template = join("\n", [
      "\"Millrace <name>: ${local.job_notices[each.key].text} (job <id>) <reason>\"",
      "\"next: make stage-status TARGET=batch\"",
      "\"runbook: docs/operations/runbooks/README.md\"",
    ])
  }
}

# AWS first mails each address a question, and sends nothing else before somebody confirms it.
resource "aws_sns_topic_subscription" "email" {
  for_each  = toset(var.emails)
  topic_arn = aws_sns_topic.this.arn
  protocol  = "email"
  endpoint  = each.value
}

# For the whole account, because a budget for a tag silently counts nothing before somebody activates the tag for cost
# allocation.
resource "aws_budgets_budget" "this" {
  count        = var.budget == null ? 0 : 1
  name         = "${var.name}-${var.account.region}"
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = tostring(var.budget.monthly_dollars)
  limit_unit   = "USD"

  dynamic "notification" {
    for_each = [["ACTUAL", 50], ["ACTUAL", 80], ["ACTUAL", 100], ["FORECASTED", 100]]
    content {
      notification_type         = notification.value[0]
      threshold                 = notification.value[1]
      threshold_type            = "PERCENTAGE"
      comparison_operator       = "GREATER_THAN"
      subscriber_sns_topic_arns = [aws_sns_topic.this.arn]
    }
  }
}

# At 100 % operators with a role of this account, and on EKS the deploy Jobs, cannot start nodes any more. What runs continues
# to its end. EKS has one call for raising and lowering a group, so they cannot lower one either; the reaper keeps that right.
resource "aws_budgets_budget_action" "stop" {
  count              = var.budget == null || length(var.stopped_roles) == 0 ? 0 : 1
  budget_name        = aws_budgets_budget.this[0].name
  action_type        = "APPLY_IAM_POLICY"
  approval_model     = "AUTOMATIC"
  notification_type  = "ACTUAL"
  execution_role_arn = aws_iam_role.budget[0].arn

  action_threshold {
    action_threshold_type  = "PERCENTAGE"
    action_threshold_value = 100
  }

  definition {
    iam_action_definition {
      policy_arn = aws_iam_policy.stop[0].arn
      roles      = var.stopped_roles[*].name
    }
  }

  subscriber {
    subscription_type = "SNS"
    address           = aws_sns_topic.this.arn
  }

  depends_on = [aws_iam_role_policy.budget]
}

resource "aws_iam_policy" "stop" {
  count       = var.budget == null ? 0 : 1
  name        = "${var.name}-${var.account.region}-over-budget"
  description = "Attached by the budget: no new Trainium nodes. Detach it in the console's budget actions."
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "NoNodes"
        Effect   = "Deny"
        Action   = var.denied_actions
        Resource = "*"
      },
      {
        Sid       = "NoInstances"
        Effect    = "Deny"
        Action    = ["ec2:RunInstances", "ec2:CreateFleet"]
        Resource  = "arn:${var.account.partition}:ec2:*:*:instance/*"
        Condition = { StringLike = { "ec2:InstanceType" = ["trn*"] } }
      },
    ]
  })
}

resource "aws_iam_role" "budget" {
  count                = var.budget == null ? 0 : 1
  name                 = "${var.name}-${var.account.region}-budget"
  description          = "The budget's action"
  permissions_boundary = var.permissions_boundary
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "budgets.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = var.account.id } }
    }]
  })
}

resource "aws_iam_role_policy" "budget" {
  count = var.budget == null ? 0 : 1
  name  = "attach-one-policy"
  role  = aws_iam_role.budget[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["iam:AttachRolePolicy", "iam:DetachRolePolicy"]
      Resource  = var.stopped_roles[*].arn
      Condition = { ArnEquals = { "iam:PolicyARN" = aws_iam_policy.stop[0].arn } }
    }]
  })
}

resource "aws_autoscaling_schedule" "zero" {
  count                  = var.zero_schedule == null ? 0 : 1
  scheduled_action_name  = "${var.name}-zero"
  autoscaling_group_name = var.trainium_autoscaling_group
  recurrence             = var.zero_schedule.cron
  time_zone              = var.zero_schedule.time_zone
  desired_capacity       = 0
  min_size               = 0
  max_size               = var.trainium_max_nodes
}

# Without nodes there is no metric, which is no alarm.
resource "aws_cloudwatch_metric_alarm" "idle" {
  count               = var.idle_alarm == null ? 0 : 1
  alarm_name          = "${var.name}-trainium-idle"
  alarm_description   = "Trainium nodes of ${var.name} are up and their NeuronCores have been idle for ${var.idle_alarm.minutes} minutes: make stage-status"
  namespace           = "ContainerInsights"
  metric_name         = "node_neuroncore_utilization"
  dimensions          = { ClusterName = var.name }
  statistic           = "Average"
  comparison_operator = "LessThanThreshold"
  threshold           = var.idle_alarm.percent
  period              = 300
  evaluation_periods  = ceil(var.idle_alarm.minutes / 5)
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.this.arn]
  ok_actions          = [aws_sns_topic.this.arn]
}

output "topic_arn" {
  value = aws_sns_topic.this.arn
}

output "stop_policy_arn" {
  description = "ARN of the policy that the budget's action attaches; null without a budget."
  value       = one(aws_iam_policy.stop[*].arn)
}

output "stopped_roles" {
  description = "Names of the roles that the budget's action stops."
  value       = var.budget == null ? [] : var.stopped_roles[*].name
}
