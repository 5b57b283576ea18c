"""Stops the jobs of the Batch stack, and deregisters the job definitions of its deployments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.account.batch_queues import list_definitions, list_job_ids, list_queues
from infra.account.session import Account
from infra.teardown.leftovers import wait_until_none
from infra.teardown.neighbours import Neighbour

JOBS_SECONDS = 12 * 3600.0
"""Limit for Batch to end all jobs. It kills a job itself after the machines' stop timeout, hours for a large model."""


@dataclass(frozen=True)
class BatchWorkloads:
    """Jobs in the stack's queues. Batch itself terminates their nodes, with the compute environments."""

    account: Account
    stack: str
    config: Path
    """The config.txt that deployments read, with the ids of the resources that terraform made."""

    @property
    def place(self) -> str:
        return f"the Batch environment of {self.stack}"

    def is_there(self) -> bool:
        return bool(list_queues(self.account, self.stack))

    def find_neighbours(self) -> list[Neighbour]:
        return []

    def stop(self) -> None:
        """Ends all jobs and waits for them. Raises `TryAgain` if one has not ended within `JOBS_SECONDS`."""
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
            JOBS_SECONDS,
            "aws batch describe-jobs --jobs ... shows why they have not ended",
        )
        print(f"jobs        0 in {', '.join(names)}, which accept no new ones", flush=True)

    def forget(self) -> None:
        """Deregisters job definitions, whose images are gone, and deletes `config.txt` if this stack wrote it."""
        for arn in list_definitions(self.account, self.stack):
            print(f"deregister  {arn.rpartition('/')[2]}", flush=True)
            self.account.client("batch").deregister_job_definition(jobDefinition=arn)
        lines = self.config.read_text(encoding="utf-8").splitlines() if self.config.is_file() else []
        if f"NAME={self.stack}" in lines and f"REGION={self.account.region}" in lines:
            self.config.unlink()
