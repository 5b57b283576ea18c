"""One deployment of a stage: what its deploy Job is to bring about, as the Job carries it.

A client writes this and the head's image reads it, and each may be older than the other. So it has a version, which a
changed field raises, and whoever cannot read one says which side to update.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import MISSING, asdict, dataclass
from typing import Literal, Self

from services.common.errors import DeviceError

DEGREE = "--parallel.data_parallel_size"

RECORD_VERSION = 5
RECORDS_READ = (1, 2, 3, 4, RECORD_VERSION)
UPDATE_CLIENT = "update the checkout that deploys: git pull"
UPDATE_HEAD = "update the head, when no stage runs: make cluster-up HEAD_TAG=... (default: what this checkout builds)"

Mode = Literal["shared", "isolated"]


class UnknownRecord(DeviceError):
    """A record that another version of this tool made, and that this one cannot read."""

    def __init__(self, message: str, is_newer: bool = True) -> None:
        super().__init__(message)
        self.is_newer = is_newer


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
    """How long pods may take to be placed and to join Ray, before the first attempt."""
    drain_seconds: int
    """Between a pod's notice and its end: a checkpoint must fit."""
    ray_version: str = ""
    """Of the image; empty: the cluster's."""
    recipe: str = ""
    """Its name, with which the names of its runs begin."""
    fewer_nodes: tuple[int, ...] = ()
    """Numbers of nodes with which the stage may go on after a loss, largest first."""
    workers_per_node: int = 1
    """Of the trainer."""
    tensor_parallel_size: int = 1
    """Of the trainer: workers that share one model."""
    node_pool: str = ""
    """The EKS managed node group (CLUSTER/GROUP) that its nodes come from; empty: they are simply there."""
    capacity_ends_at: str = ""
    """When the reservation behind the pool ends (RFC 3339); empty: never."""
    loss_timeout_seconds: int = 21_600
    """How long they may take before a further attempt, while those that are left hold their nodes."""

    def patience_seconds(self, attempts: int) -> int:
        """How long the gang of the next attempt is waited for, after so many attempts."""
        return self.loss_timeout_seconds if attempts else self.start_timeout_seconds

    def rayjob_name(self, attempt: int) -> str:
        return f"{self.stage}-{self.id}-{attempt}"

    def arguments_for(self, nodes: int) -> tuple[str, ...]:
        """The stage's options on so many nodes, which decide the trainer's data-parallel degree."""
        if nodes == self.nodes:
            return self.arguments
        kept = [each for each in self.arguments if not each.startswith(f"{DEGREE}=")]
        return (*kept, f"{DEGREE}={nodes * self.workers_per_node // self.tensor_parallel_size}")

    def differences(self, other: Deployment) -> list[str]:
        """What another deployment of the stage wants otherwise."""
        ours, theirs = asdict(self), asdict(other)
        # What follows from measurements, from the image and from the manifests.
        passing = ("id", "user", "drain_seconds", "ray_version", "node_pool", "capacity_ends_at")
        told = [key for key in ours if key not in passing and ours[key] != theirs[key]]
        return [f"{key.replace('_', ' ')} {theirs[key]} instead of {ours[key]}" for key in told]

    def to_json(self) -> str:
        return json.dumps({"version": RECORD_VERSION} | asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What a Job carries. Raises `UnknownRecord` for what another version of this tool wrote otherwise."""
        try:
            fields = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise UnknownRecord(f"its record cannot be read: {error}") from error
        version = fields.pop("version", 1)
        if version not in RECORDS_READ:
            read = ", ".join(map(str, RECORDS_READ))
            raise UnknownRecord(f"its record is of version {version}, and versions {read} are known here")
        if version < RECORD_VERSION:  # what was added since has a default
            fields = {
                each.name: each.default for each in dataclasses.fields(cls) if each.default is not MISSING
            } | fields
        odd = fields.keys() ^ {each.name for each in dataclasses.fields(cls)}
        if odd:
            is_newer = version == RECORD_VERSION and bool(odd & fields.keys())
            raise UnknownRecord(f"its record of version {version} differs in {', '.join(sorted(odd))}", is_newer)
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields | lists)
