"""One deployment of a stage, as its deploy Job carries it.

The client writes this and the head's image reads it, and the two may be of different versions. So it carries a version
number, which every change of a field raises. A deploy Job that reads another version says so and ends.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from deploy.stage_contract import DEGREE, ClusterMode
from services.common.errors import DeviceError

RECORD_VERSION = 7
_MAX_LABEL_CHARACTERS = 63


class UnknownRecord(DeviceError):
    """A deploy Job carries a deployment that this version of the program cannot read."""


@dataclass(frozen=True)
class Deployment:
    """One deployment of a stage: the image, recipe and nodes that its deploy Job brings about."""

    stage: str
    id: str
    """A random name, which tells the RayJobs of this deployment from those of earlier ones."""
    image: str
    nodes: int
    mode: ClusterMode
    recipe: str
    """The recipe's name, with which the names of its runs begin."""
    recipe_digest: str
    arguments: tuple[str, ...]
    """Options that follow the stage's own `--recipe` and `--root`."""
    retries: int
    keep: bool
    """Whether the pods stay up after the deployment has ended."""
    user: str
    start_timeout_seconds: int
    """Seconds in which pods must be placed and join Ray before the first attempt."""
    loss_timeout_seconds: int
    """Seconds in which pods must be placed and join Ray before a later attempt; pods that are left hold their nodes."""
    limit_seconds: int
    """Seconds after the deploy Job's creation, with all attempts and waits, in which the deployment is told to stop;
    0 where there is no limit."""
    drain_seconds: int
    """Grace period of a pod, in seconds; a checkpoint must fit into it."""
    fewer_nodes: tuple[int, ...]
    """Numbers of nodes, largest first, with which the stage may continue after it lost nodes."""
    workers_per_node: int
    """Number of the trainer's workers on one node."""
    tensor_parallel_size: int
    """Number of the trainer's workers that share one model."""
    node_pool: str
    """The EKS managed node group (CLUSTER/GROUP) that is scaled for the deployment; empty for static nodes."""
    capacity_ends_at: str
    """The end (RFC 3339) of the capacity reservation behind the node pool; empty where there is none."""

    @property
    def run_label(self) -> str:
        """The recipe's name as the value of a label: at most 63 characters, the last of them a letter or a digit."""
        return self.recipe[:_MAX_LABEL_CHARACTERS].rstrip("._-")

    def patience_seconds(self, attempts: int) -> int:
        """Seconds to wait for the gang of the next attempt after so many earlier attempts."""
        return self.loss_timeout_seconds if attempts else self.start_timeout_seconds

    def rayjob_name(self, attempt: int) -> str:
        return f"{self.stage}-{self.id}-{attempt}"

    def arguments_for(self, nodes: int) -> tuple[str, ...]:
        """The stage's options on so many nodes, which set the trainer's data-parallel degree."""
        if nodes == self.nodes:
            return self.arguments
        kept = [each for each in self.arguments if not each.startswith(f"{DEGREE}=")]
        return (*kept, f"{DEGREE}={nodes * self.workers_per_node // self.tensor_parallel_size}")

    def differences(self, other: Deployment) -> list[str]:
        """The requested values in which another deployment of the stage differs from this one."""
        ours, theirs = asdict(self), asdict(other)
        # Fields that follow from measurements and from the manifests are not requested by anybody.
        derived = ("id", "user", "drain_seconds", "node_pool", "capacity_ends_at")
        different = [key for key in ours if key not in derived and ours[key] != theirs[key]]
        return [f"{key.replace('_', ' ')} {theirs[key]} instead of {ours[key]}" for key in different]

    def to_json(self) -> str:
        return json.dumps({"version": RECORD_VERSION} | asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what a deploy Job carries. Raises `UnknownRecord` for what another version wrote."""
        try:
            values = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise UnknownRecord(f"its record cannot be read: {error}") from error
        version = values.pop("version", None)
        if version != RECORD_VERSION or values.keys() != {each.name for each in fields(cls)}:
            raise UnknownRecord(f"its record has version {version}, and this program reads {RECORD_VERSION}")
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)
