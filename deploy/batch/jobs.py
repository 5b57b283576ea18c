"""Jobs of stages on AWS Batch: submitted, found again, ended, and what they tell of themselves.

Batch knows an ended job for about a week. What has to outlast that is in the tags of its job definition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from deploy.batch.config import Config
from deploy.batch.job_definition import DEPLOYMENT_TAG, MAIN_NODE, Request, one_off_name
from deploy.exit_codes import EXIT_AGAIN, resolve_exit_code
from infra.account.batch_queues import ACTIVE_STATUSES, explain_queue, list_job_ids
from infra.account.session import Account, explaining_refusals, is_absent
from services.common.recipe.schema import STAGES, Stage

ALL_STATUSES = (*ACTIVE_STATUSES, "SUCCEEDED", "FAILED")
ENDED_WELL_TAG = "millrace.dev/ended-well"
"""Of a job definition: when a job of it was first seen to have ended with 0."""
JOBS_A_CALL = 100
NAME_CHARACTERS = 128


@dataclass(frozen=True)
class Job:
    """One deployment of a stage as Batch describes it."""

    id: str
    stage: Stage
    status: str
    reason: str
    """In Batch's words. Of one that ended also its last container's: a job whose image could not be pulled says only
    that its task failed to start."""
    definition: str
    """Its job definition's ARN."""
    nodes: int
    created_at: datetime
    attempts: tuple[int | None, ...]
    """Exit codes of the main node's container in the attempts that ended; None where a host was lost."""
    log_streams: tuple[str, ...]
    """Of the main node, an attempt each that has one, also of one that runs."""
    is_terminated: bool
    """By a person."""
    is_one_off: bool = False
    """Does it run a subcommand of the stage, and not the stage?"""

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE_STATUSES

    @property
    def exit_code(self) -> int:
        """Of one that has ended. A container that ended without a code was lost with its host, or stopped."""
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
    """What identifies what it runs; empty for one that somebody registered by hand."""
    ended_well: str
    """When a job of it was seen to have ended with 0; empty: never."""
    body: Request
    """As RegisterJobDefinition took it, and what Batch adds."""


class Jobs:
    """The jobs of one `config.txt`."""

    def __init__(self, account: Account, config: Config) -> None:
        self._account, self._config = account, config

    @property
    def _batch(self) -> Any:
        return self._account.client("batch")

    def definitions(self, stage: Stage, *, of_one_offs: bool = False) -> list[Definition]:
        """Those of deployments, or of one-offs, newest first. Somebody else may have registered another kind of job
        under the name."""
        name = one_off_name(self._config, stage) if of_one_offs else f"{self._config.name}-{stage}"
        with explaining_refusals(f"job definitions of {stage}"):
            found = self._account.pages(
                "batch",
                "describe_job_definitions",
                "jobDefinitions",
                jobDefinitionName=name,
                status="ACTIVE",
            )
            read = [_read_definition(each) for each in found if each["type"] == "multinode"]
        return sorted(read, key=lambda each: each.revision, reverse=True)

    def register(self, body: Request) -> Definition:
        with explaining_refusals(f"register job definition {body['jobDefinitionName']}"):
            made = self._batch.register_job_definition(**body)
        return _read_definition(body | {"jobDefinitionArn": made["jobDefinitionArn"], "revision": made["revision"]})

    def submit(self, stage: Stage, queue: str, definition: Definition, what: str, after: str = "") -> str:
        """The job's id. Its name ends in `what` it is about, such as its recipe; `after` is the id of a job that has to
        end with 0 first."""
        with explaining_refusals(f"submit a job of {stage}"):
            made = self._batch.submit_job(
                jobName=_job_name(f"{self._config.name}-{stage}-{what}"),
                jobQueue=queue,
                jobDefinition=definition.arn,
                propagateTags=True,
                tags={"millrace.dev/stage": stage, DEPLOYMENT_TAG: definition.deployment},
                dependsOn=[{"jobId": after}] if after else [],
            )
        return str(made["jobId"])

    def find(self, job_id: str) -> Job | None:
        with explaining_refusals(f"job {job_id}"):
            return next(self._describe([job_id]), None)

    def find_all(self, stage: Stage, *, of_one_offs: bool = False) -> list[Job]:
        """Those of deployments, or of one-offs, that Batch still knows, newest first."""
        with explaining_refusals(f"jobs of {stage}"):
            queues = dict.fromkeys((self._config.trainium.queue, self._config.cpu.queue))
            ids = [
                job_id
                for queue in queues
                for job_id, name in list_job_ids(self._account, queue, ALL_STATUSES)
                if name.startswith(f"{self._config.name}-")
            ]
            found = self._describe(list(dict.fromkeys(ids)))
            found = (job for job in found if job.stage == stage and job.is_one_off == of_one_offs)
        return sorted(found, key=lambda job: job.created_at, reverse=True)

    def terminate(self, job: Job, reason: str) -> None:
        """Its containers get SIGTERM, and SIGKILL after the host's stop timeout."""
        with explaining_refusals(f"terminate job {job.id}"):
            self._batch.terminate_job(jobId=job.id, reason=reason)

    def note_end(self, definition: Definition) -> Definition:
        """Let it say that a job of it ended with 0, for when Batch has forgotten the job."""
        moment = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        with explaining_refusals(f"tag {definition.arn}"):
            self._batch.tag_resource(resourceArn=definition.arn, tags={ENDED_WELL_TAG: moment})
        return replace(definition, ended_well=moment)

    def read_log(self, stage: Stage, stream: str, token: str) -> tuple[list[str], str]:
        """Lines that follow `token` (empty: from the beginning), and the next token."""
        logs = self._account.client("logs")
        arguments: dict[str, Any] = {"nextToken": token} if token else {}
        with explaining_refusals(f"log {stream}"):
            try:
                answer = logs.get_log_events(
                    logGroupName=self._config.log_groups[stage], logStreamName=stream, startFromHead=True, **arguments
                )
            except self._account.client("logs").exceptions.ResourceNotFoundException:
                return [], token
        return [each["message"] for each in answer["events"]], str(answer["nextForwardToken"])

    def explain_queue(self, queue: str) -> str:
        """Why a queue takes no job to its nodes; empty while it does."""
        with explaining_refusals(f"job queue {queue}"):
            return explain_queue(self._account, queue)

    def resolve_image(self, stage: Stage, tag: str) -> str:
        """The image by its digest; empty where the repository has no such tag."""
        repository = self._config.image_of(stage)
        if tag.startswith("sha256:"):
            return f"{repository}@{tag}"
        registry, _, name = repository.partition("/")
        with explaining_refusals(f"image {repository}:{tag}"):
            try:
                found = self._account.client("ecr").describe_images(
                    registryId=registry.partition(".")[0], repositoryName=name, imageIds=[{"imageTag": tag}]
                )
            except self._account.client("ecr").exceptions.ClientError as error:
                if is_absent(error):
                    return ""
                raise
        return f"{repository}@{found['imageDetails'][0]['imageDigest']}"

    def _describe(self, ids: list[str]) -> Iterator[Job]:
        for first in range(0, len(ids), JOBS_A_CALL // 2):
            asked = ids[first : first + JOBS_A_CALL // 2]
            both = [*asked, *(_main_node_of(each) for each in asked)]
            found = {each["jobId"]: each for each in self._batch.describe_jobs(jobs=both)["jobs"]}
            read = (self._read(found[each], found.get(_main_node_of(each), {})) for each in asked if each in found)
            yield from filter(None, read)

    def _read(self, found: Request, main_node: Request) -> Job | None:
        """Whether Batch tells of attempts with the job or with its main node is written nowhere: both are asked."""
        name = found["jobDefinition"].rpartition("/")[2].partition(":")[0]
        stages = {f"{self._config.name}-{each}": each for each in STAGES}
        one_offs = {one_off_name(self._config, each): each for each in STAGES}
        stage = (stages | one_offs).get(name)
        if stage is None:
            return None
        attempts = [_containers_of(each) for each in (main_node, found)]
        ends = next((each for each in attempts if any("exitCode" in end for end in each)), max(attempts, key=len))
        streams = [each.get("logStreamName") for each in (*ends, main_node.get("container") or {})]
        reasons = [found.get("statusReason")]
        if found["status"] not in ACTIVE_STATUSES and ends:
            reasons.append(ends[-1].get("reason"))
        return Job(
            id=found["jobId"],
            stage=stage,
            status=found["status"],
            reason=": ".join(filter(None, reasons)),
            definition=found["jobDefinition"],
            nodes=int((found.get("nodeProperties") or {}).get("numNodes", 1)),
            created_at=datetime.fromtimestamp(found["createdAt"] / 1000, UTC),
            attempts=tuple(each.get("exitCode") for each in ends),
            log_streams=tuple(dict.fromkeys(filter(None, streams))),
            is_terminated=bool(found.get("isTerminated") or found.get("isCancelled")),
            is_one_off=name in one_offs,
        )


def _job_name(wanted: str) -> str:
    """As Batch takes it: letters, digits, hyphens and underscores. A recipe's name may have more, as llama3.1 has."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", wanted)[:NAME_CHARACTERS]


def _main_node_of(job_id: str) -> str:
    return f"{job_id}#{MAIN_NODE}"


def _containers_of(job: Request) -> list[Request]:
    """Of the attempts that ended."""
    return [each.get("container") or {} for each in job.get("attempts") or []]


def _read_definition(found: Request) -> Definition:
    tags = found.get("tags") or {}
    return Definition(
        arn=found["jobDefinitionArn"],
        revision=int(found["revision"]),
        deployment=tags.get(DEPLOYMENT_TAG, ""),
        ended_well=tags.get(ENDED_WELL_TAG, ""),
        body=found,
    )
