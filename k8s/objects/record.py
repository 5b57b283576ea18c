"""The record of a deployment: what is wanted, what was tried, how it ended.

The deploy Job carries all of it. The client writes the request to stop, and the controller everything else.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from deploy.exit_codes import shorten_line
from k8s.objects.api import Api, Conflict, Object
from k8s.objects.deployment import UPDATE_CLIENT, UPDATE_HEAD, Deployment, UnknownRecord
from k8s.objects.names import (
    ATTEMPTS_ANNOTATION,
    CHECKPOINTS_ANNOTATION,
    NAMESPACE,
    OUTCOME_ANNOTATION,
    STOP_ANNOTATION,
    job_name,
)
from services.common.recipe.schema import STAGES

FULL_MESSAGES = 20
SHORT_MESSAGE_CHARACTERS = 80


@dataclass(frozen=True)
class Outcome:
    """How an attempt, which is one RayJob, or the whole deployment ended."""

    exit_code: int
    message: str
    progressed: bool = False
    """Of an attempt: is there a newer committed checkpoint than when the attempt before it ended?"""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """What a deploy Job wrote, which may be of another version: these two fields every version has."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})


@dataclass(frozen=True)
class Record:
    """A stage's deploy Job as it is now."""

    deployment: Deployment
    uid: str
    version: str
    """The Job's resourceVersion: what is written about it is written about this Job as it was read."""
    attempts: tuple[Outcome, ...]
    checkpoints: dict[str, int]
    """Newest committed step of each run of the recipe, when the last attempt ended."""
    outcome: Outcome | None
    stop: str
    """Who wants it stopped; empty when nobody does."""
    is_over: bool
    """Has the Job itself ended? An outcome is known before the stage's pods are gone."""
    is_deleted: bool
    created_at: str


def read_record(api: Api, stage: str) -> Record | None:
    """The stage's newest deployment, ended or not; None when there is none."""
    job = api.find("Job", job_name(stage))
    return record_of(job) if job else None


def read_running_record(api: Api, stage: str) -> Record | None:
    """The stage's deployment while its Job goes on; None between deployments."""
    record = read_record(api, stage)
    return record if record and not record.is_over else None


def record_of(job: Object) -> Record:
    """Raises `UnknownRecord` for a Job that another version of this tool made otherwise."""
    metadata = job["metadata"]
    annotations: dict[str, str] = metadata.get("annotations") or {}
    outcome = annotations.get(OUTCOME_ANNOTATION)
    conditions = (job.get("status") or {}).get("conditions") or []
    return Record(
        deployment=_deployment_of(job),
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        attempts=tuple(Outcome.from_fields(each) for each in json.loads(annotations.get(ATTEMPTS_ANNOTATION, "[]"))),
        checkpoints=json.loads(annotations.get(CHECKPOINTS_ANNOTATION, "{}")),
        outcome=Outcome.from_fields(json.loads(outcome)) if outcome else None,
        stop=annotations.get(STOP_ANNOTATION, ""),
        is_over=any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions),
        is_deleted="deletionTimestamp" in metadata,
        created_at=metadata["creationTimestamp"],
    )


def _deployment_of(job: Object) -> Deployment:
    try:
        return Deployment.from_json(_text_of(job))
    except UnknownRecord as error:
        name = job["metadata"]["name"]
        older = f"an older one made it: once it has ended, kubectl -n {NAMESPACE} delete job {name} forgets it"
        advice = f"a newer version of this tool made it: {UPDATE_CLIENT}" if error.is_newer else older
        raise UnknownRecord(f"Job {name}: {error}; {advice}", error.is_newer) from error


def _text_of(job: Object) -> str:
    return str(job["spec"]["template"]["spec"]["containers"][0]["args"][-1])


def refuse_record(api: Api, text: str, error: UnknownRecord) -> Outcome:
    """End the deployment of a record that the head's image, which runs this, cannot read. Nothing was begun.

    Raises `Conflict` when its Job was changed meanwhile.
    """
    side = f"the head's image is older than the client: {UPDATE_HEAD}"
    if not error.is_newer:
        side = f"the client is older than the head's image: {UPDATE_CLIENT}"
    outcome = Outcome(error.exit_code, f"nothing was begun: {error}; {side}")
    for name in map(job_name, STAGES):
        job = api.find("Job", name)
        if job and _text_of(job) == text:
            metadata = {each: job["metadata"][each] for each in ("resourceVersion", "uid")}
            annotations = {OUTCOME_ANNOTATION: json.dumps(asdict(outcome))}
            patch = {"metadata": metadata | {"annotations": annotations}}
            api.merge("Job", name, patch | no_more_failures(job))
    return outcome


def ask_to_stop(api: Api, record: Record, user: str) -> None:
    """Write a stop request to the stage's deploy Job, whose process reads it. Raises `Conflict` for another Job."""
    metadata = {"uid": record.uid, "annotations": {STOP_ANNOTATION: user}}
    api.merge("Job", job_name(record.deployment.stage), {"metadata": metadata})


def write_attempt(api: Api, record: Record, attempt: Outcome, checkpoints: dict[str, int]) -> None:
    """Add an attempt to those of the record, and the checkpoints that were there at its end.

    Raises `Conflict` when the record's Job is another by now, or was changed.
    """
    attempts = [asdict(each) for each in shorten((*record.attempts, attempt))]
    _annotate(
        api,
        record,
        {ATTEMPTS_ANNOTATION: json.dumps(attempts), CHECKPOINTS_ANNOTATION: json.dumps(checkpoints, sort_keys=True)},
    )


def shorten(attempts: tuple[Outcome, ...]) -> list[Outcome]:
    """With the beginning of what older ones said: an object's annotations have 256 KiB, for 1,500 attempts."""
    older, newer = attempts[:-FULL_MESSAGES], attempts[-FULL_MESSAGES:]
    return [*(replace(each, message=shorten_line(each.message, SHORT_MESSAGE_CHARACTERS)) for each in older), *newer]


def write_outcome(api: Api, record: Record, outcome: Outcome) -> None:
    """Raises `Conflict` when the record's Job is another by now, or was changed."""
    _annotate(api, record, {OUTCOME_ANNOTATION: json.dumps(asdict(outcome))})


def no_more_failures(job: Object) -> Object:
    """The patch of a deploy Job after which the next failure of its pod is the Job's: no pod comes after it."""
    return {"spec": {"backoffLimit": int((job.get("status") or {}).get("failed") or 0)}}


def _annotate(api: Api, record: Record, annotations: dict[str, str]) -> None:
    if not record.uid:
        raise Conflict(f"Job {job_name(record.deployment.stage)} is gone")
    metadata = {"annotations": annotations, "resourceVersion": record.version, "uid": record.uid}
    api.merge("Job", job_name(record.deployment.stage), {"metadata": metadata})
