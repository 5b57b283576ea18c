"""Stops the jobs of the Batch stack, and deregisters the job definitions of its deployments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from infra.account.batch_queues import list_definitions, list_job_ids, list_queues
from infra.account.polling import wait_until_none
from infra.account.session import Account
from infra.apply.terraform import Stack
from infra.teardown.neighbours import Neighbour, find_in_account

JOBS_SECONDS = 1800.0
"""Seconds in which Batch ends all jobs, also those whose nodes are only starting, unless a grace period is longer."""
AFTER_NOTICE_SECONDS = 300.0
"""Seconds from the end of a long grace period until Batch reports the job as ended."""


@dataclass(frozen=True)
class BatchWorkloads:
    """Jobs in the stack's queues. Batch itself terminates their nodes, with the compute environments."""

    account: Account
    stack: str
    config: Path
    """The config.txt that deployments read, with the ids of the resources that terraform made."""
    applied: Stack

    @property
    def place(self) -> str:
        return f"the Batch environment of {self.stack}"

    def is_there(self) -> bool:
        return bool(list_queues(self.account, self.stack))

    def find_neighbours(self) -> list[Neighbour]:
        """Lists resources of others in the network that the stack made. An existing network is not looked at."""
        return find_in_account(self.account, self.stack, lambda service: False)

    def stop(self) -> None:
        """Ends all jobs and waits for them.

        Raises `TryAgain` if one has not ended within the longer of `JOBS_SECONDS` and its grace period.
        """
        batch = self.account.client("batch")
        names = list_queues(self.account, self.stack)
        for name in names:
            batch.update_job_queue(jobQueue=name, state="DISABLED")  # nobody can submit another job meanwhile
            for job_id, job in list_job_ids(self.account, name):
                print(f"stopping    {job}, {job_id}", flush=True)
                batch.terminate_job(jobId=job_id, reason="make infra-down")
        wait_until_none(
            "jobs",
            lambda: [job_id for name in names for job_id, _ in list_job_ids(self.account, name)],
            max(JOBS_SECONDS, self._find_notice_seconds() + AFTER_NOTICE_SECONDS),
            "aws batch describe-jobs --jobs ... shows why they have not ended",
        )
        print(f"jobs        0 in {', '.join(names)}, which accept no new ones", flush=True)

    def _find_notice_seconds(self) -> int:
        """Seconds between a job's SIGTERM and SIGKILL, for a checkpoint; 0 if the applied stack does not say."""
        config = str(self.applied.outputs().get("config", ""))
        return max(map(int, re.findall(r"^NOTICE_SECONDS=(\d+)$", config, re.MULTILINE)), default=0)

    def forget(self) -> None:
        """Deregisters job definitions, whose images are gone, and deletes `config.txt` if this stack wrote it."""
        for arn in list_definitions(self.account, self.stack):
            print(f"deregister  {arn.rpartition('/')[2]}", flush=True)
            self.account.client("batch").deregister_job_definition(jobDefinition=arn)
        lines = self.config.read_text(encoding="utf-8").splitlines() if self.config.is_file() else []
        if f"NAME={self.stack}" in lines and f"REGION={self.account.region}" in lines:
            self.config.unlink()
