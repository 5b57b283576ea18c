"""Runs a node's part of a group under Ray Train: starts the node's agent, reports, and hears of preemption.

Ray's processes import this module, and no torch: four of them start one after the other.
"""

from __future__ import annotations

import logging
import math
import pickle  # nosec B403 # bytes that processes of the same command made
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
from ray.train.backend import BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.callback import UserCallback

from services.common.errors import AgentsLost, MillraceError
from services.common.launch.launcher import LOOPBACK_ADDRESS, Node, TrainingReport, WorkerGroup
from services.common.launch.node_process import NodeProcess

TICK_SECONDS = 2.0
"""Seconds between two exchanges of the nodes: a few small calls of each node to one actor."""
REPORT_SECONDS = 10.0
"""Seconds between two reports: each waits for the controller, which looks every two seconds."""
LOSS_FILE = "lost-nodes"
"""File in a group's shared folder with the loss after which Ray Train restarts the nodes."""

logger = logging.getLogger(__name__)

_train: Any = ray.train  # whose types are those of the first version for mypy


class NodeBackend(BackendConfig):
    """Tells Ray Train to form no process group of the nodes, in whose processes torch would open their devices."""

    backend = "none"


def describe_loss(rank: int, error: BaseException) -> str:
    """Describe why Ray Train lost a node."""
    cause = str(error).strip().splitlines() or [type(error).__name__]
    return str(error) if isinstance(error, MillraceError) else f"node {rank} of the workers was lost: {cause[0]}"


class LossFile(UserCallback):
    """Keeps the loss of a node in a file, from Ray Train's controller, for the start that follows."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """See `UserCallback`."""
        rank, error = next(iter(worker_exceptions.items()))
        self._path.write_text(describe_loss(rank, error), encoding="utf-8")


class _Tick(NamedTuple):
    """What node 0 tells the other nodes."""

    is_over: bool
    report: TrainingReport | None


def run_on_node(group: WorkerGroup) -> bytes | None:
    """Run the agent of this node: the function of Ray Train on each node.

    Returns the pickled fatal error with which the group ended, if any: only losses are errors to Ray Train. Raises
    `WorkersLost` where the agent was lost, or the agents did not meet.
    """
    context = _train.get_context()
    rank, num_nodes = context.get_world_rank(), context.get_world_size()
    address = ray.util.get_node_ip_address() if num_nodes > 1 else LOOPBACK_ADDRESS
    node = Node(rank, num_nodes, address, _take_loss(group.spec.shared_folder / LOSS_FILE) if rank == 0 else "")
    with NodeProcess(group, node) as process:
        if num_nodes > 1:
            place = broadcast_from_rank_zero((address, process.receive_port()) if rank == 0 else None)
            if rank > 0:
                process.send_address(*place)
        outcome = _Node(group, rank, process).follow()
        if isinstance(outcome, AgentsLost) and rank == 0:
            raise outcome
        return pickle.dumps(outcome) if outcome else None


def _take_loss(path: Path) -> str:
    with suppress(FileNotFoundError):
        loss = path.read_text(encoding="utf-8")
        path.unlink()
        return loss
    return ""


class _Node:
    """A node's part in what all nodes do while their agents run: report, and hear of preemption."""

    def __init__(self, group: WorkerGroup, rank: int, process: NodeProcess) -> None:
        self._group, self._rank, self._process = group, rank, process
        self._reported_at = -math.inf

    def follow(self) -> Exception | None:
        """Return the outcome of this node's agent once that of node 0 has ended.

        All nodes exchange the same messages in the same order. Raises `WorkersLost` where the agent was killed.
        """
        outcome: Exception | None = None
        has_ended = has_stopped = is_over = False
        while not is_over:
            if has_ended:
                time.sleep(TICK_SECONDS)
            elif has_ended := self._process.has_ended(TICK_SECONDS):
                outcome = self._process.outcome()
            is_over, report = broadcast_from_rank_zero(self._make_tick(has_ended) if self._rank == 0 else None)
            if report:
                self._report(report)
            if not is_over and _train.get_preemption_info() and self._rank == 0 and not has_stopped:
                has_stopped = self._has_stopped()
        if not has_ended:
            self._process.has_ended(TICK_SECONDS)  # lets it end in order
        return outcome

    def _has_stopped(self) -> bool:
        """Ask the workers to stop; on a full disk, or a mount that does not answer, again at the next tick."""
        try:
            self._group.stop()
        except OSError as error:
            logger.warning("the workers could not be asked to stop: %s", error)
            return False
        return True

    def _make_tick(self, is_over: bool) -> _Tick:
        """Choose what to report: new numbers every REPORT_SECONDS, and the newest checkpoint at the end alone.

        Ray Train keeps a list of the checkpoints that it was told, and refuses a list of which retention removed some.
        """
        now = time.monotonic()
        if not is_over and now - self._reported_at < REPORT_SECONDS:
            return _Tick(is_over, None)
        try:
            report = self._group.read_report()
        except (OSError, MillraceError) as error:  # a report is a view: the run goes on
            logger.warning("nothing is reported to Ray: %s", error)
            report = None
        if report is None:
            return _Tick(is_over, None)
        self._reported_at = now
        return _Tick(is_over, report if is_over else report._replace(checkpoint=None))

    def _report(self, report: TrainingReport) -> None:
        checkpoint = _train.Checkpoint(str(report.checkpoint)) if report.checkpoint and self._rank == 0 else None
        mode = _train.CheckpointUploadMode.NO_UPLOAD
        name = report.checkpoint.name if report.checkpoint else None
        _train.report(report.metrics, checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)
