"""The record of a deployment: what was requested, how each attempt ended, and how the deployment ended.

The deploy Job carries the whole record. The client writes the request and a request to stop; the controller writes
everything else, and the request to stop for a limit that has passed.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

from deploy.exit_codes import shorten_line
from k8s.objects.api import Api, Conflict, Object, is_job_over
from k8s.objects.deployment import Deployment, UnknownRecord
from k8s.objects.names import (
    ATTEMPTS_ANNOTATION,
    BEFORE_ANNOTATION,
    CHECKPOINTS_ANNOTATION,
    NAMESPACE,
    OUTCOME_ANNOTATION,
    PREFLIGHT_ANNOTATION,
    STOP_ANNOTATION,
    job_name,
)

FULL_MESSAGES = 20
SHORT_MESSAGE_CHARACTERS = 80


@dataclass(frozen=True)
class Acceptance:
    """The answer of a stage's image that accepts the deployment, before its first attempt."""

    ray_version: str = ""
    """The Ray version of the image."""
    upstream: list[str] = field(default_factory=list)
    """The artifacts that the stage will read, as `SCHEMA NAME/ID`."""


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt, which is one RayJob, or of a whole deployment."""

    exit_code: int
    message: str
    progressed: bool = False
    """Whether an attempt left a newer committed checkpoint than the attempt before it."""


@dataclass(frozen=True)
class Record:
    """A stage's deploy Job as it was read."""

    deployment: Deployment
    uid: str
    version: str
    """The Job's resourceVersion, which every write about the record names: another state of the Job is a conflict."""
    attempts: tuple[Outcome, ...]
    checkpoints: dict[str, int]
    """The newest committed step of each run of the recipe when the last attempt ended."""
    outcome: Outcome | None
    stop: str
    """The person who asked the deployment to stop, or its limit that has passed; empty when neither did."""
    is_over: bool
    """Whether the Job itself has ended, which it does only after the stage's pods are gone."""
    is_deleted: bool
    created_at: str
    acceptance: Acceptance | None = None
    """The answer of the stage's image; None before it has accepted, when nothing of the stage has been touched."""
    before: Deployment | None = None
    """The last deployment before this one that its image accepted; None where there is none."""

    @property
    def accepted(self) -> Deployment | None:
        """The stage's newest deployment that its image accepted: what the stage's pods, if it has any, come from."""
        return self.deployment if self.acceptance else self.before


def read_record(api: Api, stage: str) -> Record | None:
    """The stage's newest deployment, ended or not; None when there is none."""
    job = api.find("Job", job_name(stage))
    return record_of(job) if job else None


def read_running_record(api: Api, stage: str) -> Record | None:
    """The stage's deployment whose Job has not ended; None when there is none."""
    record = read_record(api, stage)
    return record if record and not record.is_over else None


def record_of(job: Object) -> Record:
    """The record that a deploy Job carries. Raises `UnknownRecord` for a Job of another version."""
    metadata = job["metadata"]
    annotations: dict[str, str] = metadata.get("annotations") or {}
    deployment = _deployment_of(job)
    outcome, accepted = annotations.get(OUTCOME_ANNOTATION), annotations.get(PREFLIGHT_ANNOTATION)
    before = annotations.get(BEFORE_ANNOTATION)
    return Record(
        deployment=deployment,
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        attempts=tuple(Outcome(**each) for each in json.loads(annotations.get(ATTEMPTS_ANNOTATION, "[]"))),
        checkpoints=json.loads(annotations.get(CHECKPOINTS_ANNOTATION, "{}")),
        outcome=Outcome(**json.loads(outcome)) if outcome else None,
        stop=annotations.get(STOP_ANNOTATION, ""),
        is_over=is_job_over(job),
        is_deleted="deletionTimestamp" in metadata,
        created_at=metadata["creationTimestamp"],
        acceptance=Acceptance(**json.loads(accepted)) if accepted else None,
        before=Deployment.from_json(before) if before else None,
    )


def find_passed_limit(record: Record) -> str:
    """The limit that has passed since the Job of a deployment that nobody stops was created, or an empty text.

    For programs in the cluster alone: a laptop's clock may differ from the API server's.
    """
    seconds = record.deployment.limit_seconds
    if not seconds or record.stop or record.outcome:
        return ""
    if time.time() < datetime.fromisoformat(record.created_at).timestamp() + seconds:
        return ""
    return f"its limit of {seconds / 3600:g} h (HOURS=)"


def _deployment_of(job: Object) -> Deployment:
    try:
        return Deployment.from_json(job["spec"]["template"]["spec"]["containers"][0]["args"][-1])
    except UnknownRecord as error:
        name = job["metadata"]["name"]
        raise UnknownRecord(
            f"Job {name}: {error}. If a newer version made it, update this checkout (git pull); else, once it has "
            f"ended: kubectl -n {NAMESPACE} delete job {name}"
        ) from error


def ask_to_stop(api: Api, record: Record, who: str) -> None:
    """Write a request of a person or of a limit to stop to the deploy Job. Raises `Conflict` for another Job."""
    metadata = {"uid": record.uid, "annotations": {STOP_ANNOTATION: who}}
    api.merge("Job", job_name(record.deployment.stage), {"metadata": metadata})


def write_acceptance(api: Api, record: Record, acceptance: Acceptance) -> None:
    """Write that the stage's image accepts the deployment. Raises `Conflict` as `write_attempt` does."""
    _annotate(api, record, {PREFLIGHT_ANNOTATION: json.dumps(asdict(acceptance))})


def write_attempt(api: Api, record: Record, attempt: Outcome, checkpoints: dict[str, int]) -> None:
    """Add an ended attempt to the record, with the checkpoints that existed at its end.

    Raises `Conflict` when the Job was replaced or changed since the record was read.
    """
    attempts = [asdict(each) for each in shorten((*record.attempts, attempt))]
    _annotate(
        api,
        record,
        {ATTEMPTS_ANNOTATION: json.dumps(attempts), CHECKPOINTS_ANNOTATION: json.dumps(checkpoints, sort_keys=True)},
    )


def shorten(attempts: tuple[Outcome, ...]) -> list[Outcome]:
    """Cut the messages of older attempts: an object's annotations hold 256 KiB, enough for 1,500 attempts."""
    older, newer = attempts[:-FULL_MESSAGES], attempts[-FULL_MESSAGES:]
    return [*(replace(each, message=shorten_line(each.message, SHORT_MESSAGE_CHARACTERS)) for each in older), *newer]


def write_outcome(api: Api, record: Record, outcome: Outcome) -> None:
    """Write how the deployment ended.

    Raises `Conflict` when the Job was replaced or changed since the record was read.
    """
    _annotate(api, record, {OUTCOME_ANNOTATION: json.dumps(asdict(outcome))})


def end_unanswered(api: Api, record: Record, outcome: Outcome) -> None:
    """Write the outcome of a deployment whose image has not answered, and let Kubernetes end its Job with its pod.

    Raises `Conflict` as `write_outcome` does, such as where the image has just accepted it.
    """
    _annotate(api, record, {OUTCOME_ANNOTATION: json.dumps(asdict(outcome))}, {"spec": {"activeDeadlineSeconds": 1}})


def _annotate(api: Api, record: Record, annotations: dict[str, str], changes: Object | None = None) -> None:
    if not record.uid:
        raise Conflict(f"Job {job_name(record.deployment.stage)} is gone")
    metadata = {"annotations": annotations, "resourceVersion": record.version, "uid": record.uid}
    api.merge("Job", job_name(record.deployment.stage), {"metadata": metadata} | (changes or {}))
