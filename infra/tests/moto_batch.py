"""AWS Batch as moto has it, but for the containers: a job stays where it was put until somebody ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from moto.batch.models import Job

from infra.account.session import STACK_TAG


def keep_jobs_still(patch: pytest.MonkeyPatch) -> None:
    """Else moto looks for Docker. A terminated job has failed at once."""
    patch.setattr(Job, "start", lambda job: None)
    patch.setattr(Job, "terminate", _terminate)


def make_queue(client: Callable[[str], Any], name: str, stack: str = "millrace") -> str:
    """A job queue, and a compute environment of that name; the queue's ARN."""
    batch, ec2, iam = client("batch"), client("ec2"), client("iam")
    # Batch refuses to make any without them; moto asks whether they are there.
    role = iam.create_role(RoleName=f"of-{name}", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    profile = iam.create_instance_profile(InstanceProfileName=f"of-{name}")["InstanceProfile"]["Arn"]
    environment = batch.create_compute_environment(
        computeEnvironmentName=name,
        type="MANAGED",
        state="ENABLED",
        serviceRole=role,
        tags={STACK_TAG: stack},
        computeResources={
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": 512,
            "instanceTypes": ["c5.large"],
            "instanceRole": profile,
            "subnets": [ec2.describe_subnets()["Subnets"][0]["SubnetId"]],
            "securityGroupIds": [ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
        },
    )["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": environment}]
    made = batch.create_job_queue(
        jobQueueName=name, state="ENABLED", priority=1, computeEnvironmentOrder=order, tags={STACK_TAG: stack}
    )
    return str(made["jobQueueArn"])


def submit_job(client: Callable[[str], Any], queue: str, definition: str) -> str:
    """A job of a new revision of the definition; its id."""
    batch = client("batch")
    size = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
    properties = {"image": "trainer", "resourceRequirements": size}
    made = batch.register_job_definition(
        jobDefinitionName=definition, type="container", containerProperties=properties
    )["jobDefinitionArn"]
    return str(batch.submit_job(jobName=f"{definition}-a", jobQueue=queue, jobDefinition=made)["jobId"])


def _terminate(job: Any, reason: str) -> None:
    job.status, job.job_stopped_reason = "FAILED", reason
