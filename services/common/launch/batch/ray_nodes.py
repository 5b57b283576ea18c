"""Lets the nodes of a batch job exchange their state at Ray's head, without being workers or drivers of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]
from ray.exceptions import RayError

from services.common.launch.batch.ray_process import NODE_LABEL

CALL_SECONDS = 10.0
_NAMESPACE, _IS_OVER, _HAS_LEFT = b"millrace", b"is-over", b"has-left-"


class RayNodes:
    """The nodes that have joined a head, and the note at the head that the stage finished.

    Every call raises `ConnectionError` when the head does not answer for CALL_SECONDS. Ray's library ends a process
    whose head has been silent for 60 s: callers check the head's port first, and leave earlier.
    """

    def __init__(self, address: str) -> None:
        with _asking_head():
            self._client = GcsClient(address=address)

    def live_indices(self) -> set[int]:
        """Indices of the nodes that are alive in Ray's view, where a lost node stays for five times
        RAY_health_check_period_ms and a second: 6 s as Millrace deploys stages, 16 s by Ray's default.
        """
        with _asking_head():
            nodes = self._client.get_all_node_info(timeout=CALL_SECONDS).values()
        labels = [dict(node.labels) for node in nodes if node.state == GcsNodeInfo.GcsNodeState.ALIVE]
        return {int(each[NODE_LABEL]) for each in labels if NODE_LABEL in each} - self._left_indices()

    def say_left(self, index: int) -> None:
        """Tell the head that a node has left: Ray itself takes the node for alive for some seconds more."""
        with _asking_head():
            self._client.internal_kv_put(_HAS_LEFT + b"%d" % index, b"1", True, _NAMESPACE, timeout=CALL_SECONDS)

    def _left_indices(self) -> set[int]:
        with _asking_head():
            keys = self._client.internal_kv_keys(_HAS_LEFT, _NAMESPACE, timeout=CALL_SECONDS)
        return {int(key.removeprefix(_HAS_LEFT)) for key in keys}

    def announce_end(self) -> None:
        """Tell all nodes that they may leave: the work has ended, well or not."""
        with _asking_head():
            self._client.internal_kv_put(_IS_OVER, b"1", True, _NAMESPACE, timeout=CALL_SECONDS)

    def is_over(self) -> bool:
        """Whether the main node has called `announce_end`."""
        with _asking_head():
            return self._client.internal_kv_get(_IS_OVER, _NAMESPACE, timeout=CALL_SECONDS) is not None


@contextmanager
def _asking_head() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise ConnectionError(str(error)) from error
