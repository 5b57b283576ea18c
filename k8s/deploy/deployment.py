"""One deployment of a stage: what is wanted, what was tried, how it ended. All of it is in its deploy Job."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

from k8s.deploy.api import Api, Conflict, Object
from k8s.deploy.names import ATTEMPTS_ANNOTATION, OUTCOME_ANNOTATION, STOP_ANNOTATION, job_name
from services.common.errors import TryAgain

EXIT_AGAIN = TryAgain.exit_code

Mode = Literal["shared", "isolated"]


@dataclass(frozen=True)
class Deployment:
    """What a deploy Job is to bring about."""

    stage: str
    id: str
    """Random: tells this deployment's RayJobs from those of earlier ones."""
    image: str
    nodes: int
    mode: Mode
    recipe_digest: str
    arguments: tuple[str, ...]
    """Options after the stage's own `--recipe` and `--root`."""
    retries: int
    keep: bool
    """Leave the pods up afterwards."""
    user: str
    start_timeout_seconds: int
    """How long pods may take to be placed and to join Ray."""
    drain_seconds: int
    """Between a pod's notice and its end: a checkpoint must fit."""
    ray_version: str = ""
    """Of the image; empty: the cluster's."""

    def rayjob(self, attempt: int) -> str:
        return f"{self.stage}-{self.id}-{attempt}"

    def differences(self, other: Deployment) -> list[str]:
        """What another deployment of the stage wants otherwise."""
        ours, theirs = asdict(self), asdict(other)
        passing = ("id", "user", "drain_seconds", "ray_version")  # what follows from measurements and from the image
        told = [key for key in ours if key not in passing and ours[key] != theirs[key]]
        return [f"{key.replace('_', ' ')} {theirs[key]} instead of {ours[key]}" for key in told]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What a Job carries. Another version of this tool may have made it: unknown fields are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {key: value for key, value in json.loads(text).items() if key in known}
        return cls(**fields | {"arguments": tuple(fields["arguments"])})


@dataclass(frozen=True)
class Ending:
    """How an attempt, which is one RayJob, or the whole deployment ended."""

    exit_code: int
    message: str


@dataclass(frozen=True)
class Record:
    """A stage's deploy Job as it is now."""

    deployment: Deployment
    uid: str
    version: str
    """The Job's resourceVersion: what is written about it is written about this Job as it was read."""
    attempts: tuple[Ending, ...]
    outcome: Ending | None
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
    metadata = job["metadata"]
    annotations: dict[str, str] = metadata.get("annotations") or {}
    outcome = annotations.get(OUTCOME_ANNOTATION)
    conditions = (job.get("status") or {}).get("conditions") or []
    return Record(
        deployment=Deployment.from_json(job["spec"]["template"]["spec"]["containers"][0]["args"][-1]),
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        attempts=tuple(Ending(**each) for each in json.loads(annotations.get(ATTEMPTS_ANNOTATION, "[]"))),
        outcome=Ending(**json.loads(outcome)) if outcome else None,
        stop=annotations.get(STOP_ANNOTATION, ""),
        is_over=any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions),
        is_deleted="deletionTimestamp" in metadata,
        created_at=metadata["creationTimestamp"],
    )


def ask_to_stop(api: Api, record: Record, user: str) -> None:
    """Leave the wish that the stage stop at its deploy Job, which looks for it. Raises `Conflict` for another Job."""
    metadata = {"uid": record.uid, "annotations": {STOP_ANNOTATION: user}}
    api.merge("Job", job_name(record.deployment.stage), {"metadata": metadata})


def write_attempt(api: Api, record: Record, attempt: Ending) -> None:
    """Add an attempt to those of the record. Raises `Conflict` when its Job is another by now, or was changed."""
    attempts = [asdict(each) for each in (*record.attempts, attempt)]
    _annotate(api, record, {ATTEMPTS_ANNOTATION: json.dumps(attempts)})


def write_outcome(api: Api, record: Record, outcome: Ending) -> None:
    """Raises `Conflict` when the record's Job is another by now, or was changed."""
    _annotate(api, record, {OUTCOME_ANNOTATION: json.dumps(asdict(outcome))})


def _annotate(api: Api, record: Record, annotations: dict[str, str]) -> None:
    if not record.uid:
        raise Conflict(f"Job {job_name(record.deployment.stage)} is gone")
    metadata = {"annotations": annotations, "resourceVersion": record.version, "uid": record.uid}
    api.merge("Job", job_name(record.deployment.stage), {"metadata": metadata})
