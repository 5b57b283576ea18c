"""Reads a stack's job queues, compute environments, jobs and job definitions from AWS Batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infra.account.session import STACK_TAG, Account
from services.common.recipe.schema import STAGES

ACTIVE_STATUSES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")


@dataclass(frozen=True)
class ComputeEnvironment:
    """A compute environment, in which Batch starts the nodes of a queue."""

    name: str
    subnet_ids: tuple[str, ...]
    ami_ids: tuple[str, ...]
    """Machine images chosen for its nodes; empty if Batch chooses."""
    problem: str
    """Batch's explanation why the environment accepts no job; empty while it does."""


@dataclass(frozen=True)
class Queue:
    """A job queue."""

    name: str
    environment_arns: tuple[str, ...]
    problem: str
    """Batch's explanation why the queue gives no job to nodes; empty while it does."""


def list_queues(account: Account, stack: str) -> list[Queue]:
    """The queues with the stack's tag."""
    found = account.pages("batch", "describe_job_queues", "jobQueues")
    return sorted((_read_queue(each) for each in found if _is_of(each, stack)), key=lambda queue: queue.name)


def find_queue(account: Account, name: str) -> Queue | None:
    found = account.client("batch").describe_job_queues(jobQueues=[name])["jobQueues"]
    return _read_queue(found[0]) if found else None


def list_environments(account: Account, stack: str) -> list[ComputeEnvironment]:
    """The compute environments with the stack's tag."""
    found = account.pages("batch", "describe_compute_environments", "computeEnvironments")
    return [_read_environment(each) for each in found if _is_of(each, stack)]


def environments_of(account: Account, queue: Queue) -> list[ComputeEnvironment]:
    found = account.client("batch").describe_compute_environments(computeEnvironments=list(queue.environment_arns))
    return [_read_environment(each) for each in found["computeEnvironments"]]


def explain_queue(account: Account, name: str) -> str:
    """Explains why a queue gives no job to nodes; empty while it does."""
    queue = find_queue(account, name)
    if queue is None:
        return f"job queue {name} does not exist in {account.region}: make infra-up STACK=batch makes it"
    if queue.problem:
        return queue.problem
    return "; ".join(each.problem for each in environments_of(account, queue) if each.problem)


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


def _is_of(found: dict[str, Any], stack: str) -> bool:
    return bool((found.get("tags") or {}).get(STACK_TAG) == stack)


def _read_queue(found: dict[str, Any]) -> Queue:
    name, environments = found["jobQueueName"], found["computeEnvironmentOrder"]
    arns = tuple(each["computeEnvironment"] for each in environments)
    return Queue(name, arns, _explain_state("job queue", name, found))


def _read_environment(found: dict[str, Any]) -> ComputeEnvironment:
    name, resources = found["computeEnvironmentName"], found.get("computeResources") or {}
    chosen = (each.get("imageIdOverride") for each in resources.get("ec2Configuration") or ())
    problem = _explain_state("compute environment", name, found)
    return ComputeEnvironment(name, tuple(resources.get("subnets") or ()), tuple(filter(None, chosen)), problem)


def _explain_state(what: str, name: str, found: dict[str, Any]) -> str:
    """Explains any state but ENABLED and VALID. Whole words are compared, because INVALID contains VALID."""
    if (found["state"], found["status"]) == ("ENABLED", "VALID"):
        return ""
    reason = found.get("statusReason") or "Batch gives no reason"
    return f"{what} {name} is {found['state']} and {found['status']}: {reason}"
