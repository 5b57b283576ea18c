"""Reads a stack's job queues, compute environments, jobs and job definitions from AWS Batch."""

from __future__ import annotations

from collections.abc import Iterator

from infra.account.session import STACK_TAG, Account
from services.common.recipe.schema import STAGES

ACTIVE_STATUSES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")


def list_queues(account: Account, stack: str) -> list[str]:
    """Names of the queues with the stack's tag."""
    found = account.pages("batch", "describe_job_queues", "jobQueues")
    return sorted(each["jobQueueName"] for each in found if (each.get("tags") or {}).get(STACK_TAG) == stack)


def list_job_ids(
    account: Account, queue: str, statuses: tuple[str, ...] = ACTIVE_STATUSES
) -> Iterator[tuple[str, str]]:
    """Id and name of each job in a queue."""
    for status in statuses:
        for each in account.pages("batch", "list_jobs", "jobSummaryList", jobQueue=queue, jobStatus=status):
            yield each["jobId"], each["jobName"]


def list_definitions(account: Account, stack: str) -> list[str]:
    """ARNs of the active revisions that deployments registered."""
    asked = [{"jobDefinitionName": f"{stack}-{stage}", "status": "ACTIVE"} for stage in STAGES]
    pages = (account.pages("batch", "describe_job_definitions", "jobDefinitions", **each) for each in asked)
    return [each["jobDefinitionArn"] for page in pages for each in page]
