"""Tells which nodes of a Ray cluster were lost and why a task was lost, in a few words without Ray's advice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions

from services.common.errors import MillraceError, WorkersLost

_CAUSES: dict[type[Exception], str] = {
    ray.exceptions.WorkerCrashedError: "its process died",
    ray.exceptions.NodeDiedError: "its node was lost",
    ray.exceptions.LocalRayletDiedError: "the raylet of its node ended",
    ray.exceptions.OutOfMemoryError: "its node killed it because memory ran out",
    ray.exceptions.ObjectLostError: "its result was lost with a node",
    ray.exceptions.TaskUnschedulableError: "its node has left the cluster, or is too small",
}
LOST_BY_RAY = tuple(_CAUSES)
"""Errors of Ray for a task whose process or node was lost, and which Ray does not run again."""


@contextmanager
def raising_causes(name: str) -> Iterator[None]:
    """Replace an error of `ray.get`: by the error that the task raised, or by `WorkersLost` where the task was lost."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, MillraceError | OSError) else error) from None
    except LOST_BY_RAY as error:
        raise WorkersLost(f"Ray lost {name}: {explain_lost_task(error)}") from error


def explain_lost_task(error: BaseException) -> str:
    """Say why a task was lost that ended with one of LOST_BY_RAY, with the numbers that Ray has for full memory."""
    cause = next(cause for kind, cause in _CAUSES.items() if isinstance(error, kind))
    memory = re.search(r"[\d.]+GB / [\d.]+GB", str(error))
    return f"{cause} ({memory[0]} in use)" if memory else cause


def find_lost_nodes(nodes: Sequence[str]) -> list[int]:
    """Return the positions of those node ids that are no longer among Ray's live nodes, by one call to Ray's head."""
    worker: Any = ray._private.worker.global_worker
    are_alive = worker.gcs_client.check_alive([ray.NodeID.from_hex(node) for node in nodes])
    return [position for position, is_alive in enumerate(are_alive) if not is_alive]


def explain_lost_node(node: str) -> str:
    """Name the host of a node that was lost, and the reason that Ray's head has noted."""
    found: dict[str, Any] = next((each for each in ray.nodes() if each["NodeID"] == node), {})
    reason = found.get("DeathReasonMessage") or "Ray gives no reason"
    return f"{found.get('NodeManagerAddress', 'its host')} is no longer among Ray's live nodes ({reason})"
