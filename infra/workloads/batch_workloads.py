"""What runs on the Batch stack: jobs, and the definitions that deployments registered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.account.batch_queues import list_definitions, list_job_ids, list_queues
from infra.account.polling import wait_until_none
from infra.account.session import Account, explaining_refusals
from infra.teardown.neighbours import Neighbour, find_in_account
from services.common.input.files import read_file

# A trainer commits a checkpoint within its stop timeout; a job that is being placed is ended once it has been.
JOBS_SECONDS = 1800.0


@dataclass(frozen=True)
class BatchWorkloads:
    """Jobs of the stack's queues. Nodes are the compute environments' own: Batch ends them with those."""

    account: Account
    stack: str
    config: Path
    """That deployments read, and that names what terraform made."""

    @property
    def place(self) -> str:
        return f"the Batch environment of {self.stack}"

    def is_there(self) -> bool:
        return bool(list_queues(self.account, self.stack))

    def find_neighbours(self) -> list[Neighbour]:
        """What others have in the network that the stack made; in one that was given, nothing is looked at."""
        return find_in_account(self.account, self.stack, lambda service: False)

    def stop(self) -> None:
        """Raises `TryAgain` where a job does not end in time."""
        with explaining_refusals("infra-down, jobs"):
            names = [queue.name for queue in list_queues(self.account, self.stack)]
            for name in names:
                # So that nobody submits another one meanwhile.
                self.account.client("batch").update_job_queue(jobQueue=name, state="DISABLED")
                self._terminate_jobs(name)
            wait_until_none(
                "jobs",
                lambda: [job_id for name in names for job_id, _ in list_job_ids(self.account, name)],
                JOBS_SECONDS,
                "aws batch describe-jobs --jobs ... says what holds them",
            )
        print(f"jobs        0 in {', '.join(names)}, which take no more", flush=True)

    def forget(self) -> None:
        """Definitions of images that are gone, and `config.txt` if it is this stack's."""
        with explaining_refusals("infra-down, job definitions"):
            for arn in list_definitions(self.account, self.stack):
                print(f"deregister  {arn.rpartition('/')[2]}", flush=True)
                self.account.client("batch").deregister_job_definition(jobDefinition=arn)
        lines = read_file(self.config).decode().splitlines() if self.config.is_file() else []
        if f"NAME={self.stack}" in lines and f"REGION={self.account.region}" in lines:
            self.config.unlink()

    def _terminate_jobs(self, queue: str) -> None:
        for job_id, name in list_job_ids(self.account, queue):
            print(f"stopping    {name}, {job_id}", flush=True)
            self.account.client("batch").terminate_job(jobId=job_id, reason="make infra-down")
