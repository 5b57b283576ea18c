"""The environment variables through which notices are set up; programs that only render commands import these alone."""

from __future__ import annotations

WEBHOOK_VARIABLE = "MILLRACE_WEBHOOK"
"""Environment variable with the webhook's URL, of processes whose recipe names no other place."""
TOPIC_VARIABLE = "MILLRACE_NOTIFY_TOPIC"
"""Environment variable with the ARN of an SNS topic."""
RELAY_VARIABLE = "MILLRACE_NOTICES"
RELAY = "relay"
"""Value of RELAY_VARIABLE where another process sends the notices: a pod of a stage reaches no receiver on Kubernetes,
and holds no secret; the deploy Job reads its outbox."""
