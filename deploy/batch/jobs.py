"""Submits, finds, follows and terminates the jobs of stages on AWS Batch.

Batch forgets an ended job after about a week. Tags of its job definition hold what must outlast that.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from deploy.batch.config import Config
from deploy.batch.job_definition import (
    DEPLOYMENT_TAG,
    MAIN_NODE,
    RUN_TAG,
    JobSpec,
    Request,
    name_definition,
    read_container,
)
from deploy.exit_codes import EXIT_AGAIN, find_error_line, resolve_exit_code
from deploy.progress import ProgressPrinter, print_line
from infra.account.batch_queues import ACTIVE_STATUSES, list_job_ids
from infra.account.session import Account, explaining_refusals
from services.common.errors import DeviceError, TryAgain
from services.common.recipe.schema import Stage

ALL_STATUSES = (*ACTIVE_STATUSES, "SUCCEEDED", "FAILED")
SUCCEEDED_TAG = "millrace.dev/succeeded-at"
"""Tag of a job definition: the time at which one of its jobs was first seen to have ended with exit code 0."""
JOBS_A_CALL = 100
POLL_SECONDS = 5.0
KEPT_LINES = 200
NAME_CHARACTERS = 128


@dataclass(frozen=True)
class BatchJob:
    """A job of a stage, as Batch describes it."""

    id: str
    stage: Stage
    status: str
    reason: str
    """Batch's reason for the status, and the last container's where the job has ended: a job whose image could not be
    pulled only says that its task failed to start."""
    definition: str
    """ARN of the job definition."""
    nodes: int
    created_at: datetime
    started_at: datetime | None
    """Time at which the newest attempt got its nodes; None before."""
    attempts: tuple[int | None, ...]
    """Exit code of the main node's container, for every ended attempt; None where a host was lost."""
    log_streams: tuple[str, ...]
    """Log streams of the main node, one an attempt, that of a running attempt included."""
    is_terminated: bool
    """Whether a person terminated or cancelled the job."""

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE_STATUSES

    @property
    def state(self) -> str:
        """Status and reason in words."""
        return f"{self.status.lower()}{f': {self.reason}' if self.reason else ''}"

    @property
    def exit_code(self) -> int:
        """Exit code of an ended job. A container without an exit code was stopped, or lost with its host: 75."""
        if self.status == "SUCCEEDED":
            return 0
        if self.is_terminated or not self.attempts:
            return EXIT_AGAIN
        return resolve_exit_code(self.attempts[-1]) or EXIT_AGAIN


@dataclass(frozen=True)
class Definition:
    """A registered revision of a stage's job definition."""

    arn: str
    revision: int
    deployment: str
    """Digest of the deployment; empty for a job definition that somebody registered by hand."""
    succeeded_at: str
    """Time at which one of its jobs was seen to have ended with exit code 0; empty where none was."""
    body: Request
    """The job definition as Batch describes it: the registered request, with some keys added."""

    @property
    def container(self) -> Request:
        return read_container(self.body)


class Jobs:
    """Jobs and job definitions in the account of a `config.txt`."""

    def __init__(self, account: Account, config: Config) -> None:
        self._account, self._config = account, config

    @property
    def _batch(self) -> Any:
        return self._account.client("batch")

    def definitions(self, stage: Stage, *, of_one_offs: bool = False) -> list[Definition]:
        """Job definitions of the stage's deployments, or of its one-offs, newest first.

        Single-node job definitions of the same name are left out: somebody else registered them.
        """
        asked = {"jobDefinitionName": name_definition(self._config, stage, of_one_offs=of_one_offs), "status": "ACTIVE"}
        with explaining_refusals(f"job definitions of {stage}"):
            found = self._account.pages("batch", "describe_job_definitions", "jobDefinitions", **asked)
            read = [_read_definition(each) for each in found if each["type"] == "multinode"]
        return sorted(read, key=lambda each: each.revision, reverse=True)

    def submit(self, spec: JobSpec, queue: str, body: Request, same: Definition | None, after: str = "") -> str:
        """Submit a job of the registered definition `same`, or of `body`, which is registered first: the job's id.

        `after` is the id of a job that has to end with exit code 0 first.
        """
        if same is None:
            with explaining_refusals(f"register job definition {body['jobDefinitionName']}"):
                made = self._batch.register_job_definition(**body)
            same = _read_definition(body | {key: made[key] for key in ("jobDefinitionArn", "revision")})
        # A recipe's name may have a dot, as llama3.1 does, which Batch refuses in a name.
        name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{self._config.name}-{spec.stage}-{spec.run}")
        with explaining_refusals(f"submit a job of {spec.stage}"):
            made = self._batch.submit_job(
                jobName=name[:NAME_CHARACTERS],
                jobQueue=queue,
                jobDefinition=same.arn,
                propagateTags=True,
                tags={"millrace.dev/stage": spec.stage, DEPLOYMENT_TAG: same.deployment, RUN_TAG: spec.run},
                dependsOn=[{"jobId": after}] if after else [],
            )
        waits = f", after job {after}" if after else ""
        print(f"submitted   job {made['jobId']}, {same.arn.rpartition('/')[2]}, to {queue}{waits}", flush=True)
        return str(made["jobId"])

    def find(self, job_id: str) -> BatchJob | None:
        with explaining_refusals(f"job {job_id}"):
            return next(self._describe([job_id]), None)

    def find_all(self, stage: Stage, *, of_one_offs: bool = False) -> list[BatchJob]:
        """Jobs of the stage's deployments, or of its one-offs, that Batch still knows, newest first."""
        definition = name_definition(self._config, stage, of_one_offs=of_one_offs)
        with explaining_refusals(f"jobs of {stage}"):
            ids = [
                job_id
                for queue in {self._config.trainium.name, self._config.cpu.name}
                for job_id, name in list_job_ids(self._account, queue, ALL_STATUSES)
                if name.startswith(f"{self._config.name}-{stage}-")
            ]
            found = [job for job in self._describe(ids) if _name_of(job.definition) == definition]
        return sorted(found, key=lambda job: job.created_at, reverse=True)

    def terminate(self, job: BatchJob, reason: str) -> None:
        """Send SIGTERM to the job's containers. SIGKILL follows after the host's stop timeout."""
        with explaining_refusals(f"terminate job {job.id}"):
            self._batch.terminate_job(jobId=job.id, reason=reason)

    def note_end(self, definition: Definition) -> Definition:
        """Tag the job definition with the time at which its job was seen to have ended with exit code 0."""
        moment = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        with explaining_refusals(f"tag {definition.arn}"):
            self._batch.tag_resource(resourceArn=definition.arn, tags={SUCCEEDED_TAG: moment})
        return replace(definition, succeeded_at=moment)

    def read_log(self, stage: Stage, stream: str, token: str) -> tuple[list[str], str]:
        """Lines of the stream after `token`, or from its beginning where that is empty; and the next token."""
        asked = {"logGroupName": self._config.log_groups[stage], "logStreamName": stream, "startFromHead": True}
        with explaining_refusals(f"log {stream}"):
            answer = self._account.find("logs", "get_log_events", **asked, **({"nextToken": token} if token else {}))
        return ([each["message"] for each in answer["events"]], answer["nextForwardToken"]) if answer else ([], token)

    def resolve_image(self, stage: Stage, tag: str) -> str:
        """The image of a tag or a digest, by digest; empty where the repository has no such tag."""
        repository = self._config.image_of(stage)
        if tag.startswith("sha256:"):
            return f"{repository}@{tag}"
        registry, _, name = repository.partition("/")
        with explaining_refusals(f"image {repository}:{tag}"):
            asked = {"registryId": registry.partition(".")[0], "repositoryName": name, "imageIds": [{"imageTag": tag}]}
            found = self._account.find("ecr", "describe_images", **asked)
        return f"{repository}@{found['imageDetails'][0]['imageDigest']}" if found else ""

    def _describe(self, ids: list[str]) -> Iterator[BatchJob]:
        for first in range(0, len(ids), JOBS_A_CALL // 2):
            asked = ids[first : first + JOBS_A_CALL // 2]
            both = [name for each in asked for name in (each, f"{each}#{MAIN_NODE}")]
            found = {each["jobId"]: each for each in self._batch.describe_jobs(jobs=both)["jobs"]}
            for each in asked:
                if each in found:
                    definition = _name_of(found[each]["jobDefinition"]).removeprefix(f"{self._config.name}-")
                    stage = cast(Stage, definition.partition("-")[0])
                    yield _read_job(stage, found[each], found.get(f"{each}#{MAIN_NODE}", {}))


def follow(
    jobs: Jobs,
    job_id: str,
    is_log_whole: bool = False,
    take: Callable[[str], None] = print_line,
    look: Callable[[BatchJob], object] = lambda job: None,
) -> BatchJob:
    """Follow the job until it has ended, and return it. Interrupting this does not stop the job.

    `look` receives the job's description at every poll, and `take` every line of the log; `is_log_whole` includes the
    logs of earlier attempts. A poll that Batch does not answer is repeated. Raises `DeviceError` for a job that Batch
    does not know.
    """
    report, tokens, kept = ProgressPrinter(f"job {job_id}").report, dict[str, str](), list[str]()
    while True:
        try:
            job = jobs.find(job_id)
            if job is None:
                raise DeviceError(
                    f"Batch knows no job {job_id}: make stage-status TARGET=batch shows the jobs that it knows"
                )
            tried = f", attempt {len(job.attempts) + 1}" if job.is_active and job.attempts else ""
            report(f"{job.stage}{tried} is {job.state}")
            look(job)
            for stream in job.log_streams if is_log_whole or not job.is_active else job.log_streams[-1:]:
                while True:
                    before = tokens.get(stream, "")
                    lines, tokens[stream] = jobs.read_log(job.stage, stream, before)
                    kept = [*kept, *lines][-KEPT_LINES:]
                    for line in lines:
                        take(line)
                    if tokens[stream] == before:  # CloudWatch returns the same token at the end
                        break
            if not job.is_active:
                said = f": {find_error_line(chr(10).join(kept))}" if job.exit_code and kept else ""
                print_line(f"job {job.id}: {job.stage} ended with exit code {job.exit_code}{said}")
                return job
        except TryAgain as error:
            report(f"{error}; the job continues")
        time.sleep(POLL_SECONDS)


def _name_of(definition: str) -> str:
    """Name of a job definition, of its ARN."""
    return definition.rpartition("/")[2].partition(":")[0]


def _read_job(stage: Stage, found: Request, main_node: Request) -> BatchJob:
    """Batch does not document whether it lists attempts with a job or with its main node, so both are read."""
    attempts = [[each.get("container") or {} for each in job.get("attempts") or []] for job in (main_node, found)]
    ends = next((each for each in attempts if any("exitCode" in end for end in each)), max(attempts, key=len))
    streams = [each.get("logStreamName") for each in (*ends, main_node.get("container") or {})]
    reasons = [found.get("statusReason")]
    if found["status"] not in ACTIVE_STATUSES and ends:
        reasons.append(ends[-1].get("reason"))
    return BatchJob(
        id=found["jobId"],
        stage=stage,
        status=found["status"],
        reason=": ".join(filter(None, reasons)),
        definition=found["jobDefinition"],
        nodes=int((found.get("nodeProperties") or {}).get("numNodes", 1)),
        created_at=datetime.fromtimestamp(found["createdAt"] / 1000, UTC),
        started_at=datetime.fromtimestamp(found["startedAt"] / 1000, UTC) if found.get("startedAt") else None,
        attempts=tuple(each.get("exitCode") for each in ends),
        log_streams=tuple(dict.fromkeys(filter(None, streams))),
        is_terminated=bool(found.get("isTerminated") or found.get("isCancelled")),
    )


def _read_definition(found: Request) -> Definition:
    tags = found.get("tags") or {}
    return Definition(
        arn=found["jobDefinitionArn"],
        revision=int(found["revision"]),
        deployment=tags.get(DEPLOYMENT_TAG, ""),
        succeeded_at=tags.get(SUCCEEDED_TAG, ""),
        body=found,
    )
