"""Tells from the heartbeats on disk whether a step hung when the workers were lost, and which ranks were silent.

The agent of each node writes the heartbeats of its workers every ten seconds, and once more before it kills them. So
the command reads one small file for each node, and only after a loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.common.launch.node_heartbeats import WorkerHeartbeat, list_nodes, read_node_heartbeats
from services.trainer.job import Job, rank_log

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which a worker counts as silent on its node."""
MISSING_BEATS = 20
"""Heartbeats less than another worker's by which one of a lost node counts as silent: its agent last wrote up to ten
seconds before, and workers start within seconds. So no node's clock is compared with another's.
"""
STEP = "step"
"""Phase of a heartbeat that has a limit."""


class Hang(NamedTuple):
    """A step that took longer than its limit."""

    rank: int
    """Lowest rank that waited for longer than the limit."""
    step: int
    """Number of the step, from 1."""
    seconds: float
    silent_ranks: list[int]
    """Ranks without a heartbeat."""
    message: str


def find_hang(job: Job) -> Hang | None:
    """Return the hang with which this start of the workers ended; None where it ended otherwise."""
    hosts: dict[int, str] = {}
    found: dict[int, WorkerHeartbeat] = {}
    for node in list_nodes(job.run_folder):
        heartbeats = read_node_heartbeats(job.run_folder, node)
        for worker in heartbeats.workers:
            fields = worker.fields
            if (fields.get("attempt"), fields.get("start")) == (job.attempt, job.start_number):
                found[fields["rank"]], hosts[fields["rank"]] = worker, heartbeats.host
    late = [rank for rank in sorted(found) if _is_late(found[rank].fields)]
    if not late:
        return None
    fields = found[late[0]].fields
    beats = max(worker.fields["beats"] for worker in found.values())
    silent = [rank for rank in range(job.recipe.parallel.num_workers) if _is_silent(found.get(rank), beats)]
    described = [_describe(rank, found.get(rank), hosts.get(rank, "")) for rank in silent]
    step, seconds, limit = fields["step"] + 1, fields["phase_seconds"], fields["limit_seconds"]
    rule = f"the larger of train.watchdog_min_seconds and {job.recipe.train.watchdog_factor:g} median steps"
    silence = f"No heartbeat came from {'; '.join(described)}." if silent else "All workers had a heartbeat."
    stacks = rank_log(job.run_folder, late[0])
    text = f"rank {late[0]}: step {step} has taken {seconds:.0f} s, the limit is {limit:.0f} s ({rule}). {silence} "
    return Hang(late[0], step, seconds, silent, f"{text}Stacks are in {stacks}.")


def _is_late(fields: dict[str, Any]) -> bool:
    """Whether a worker waited in a step up to its limit. Its last heartbeat is up to HEARTBEAT_SECONDS older."""
    limit = fields["limit_seconds"]
    if fields["phase"] != STEP or limit is None:
        return False
    return bool(fields["phase_seconds"] >= limit - 1.5 * HEARTBEAT_SECONDS)


def _is_silent(worker: WorkerHeartbeat | None, beats: int) -> bool:
    """Whether a worker wrote nothing for some time, while another one has written `beats` heartbeats."""
    if worker is None or worker.silent_seconds >= SILENT_SECONDS:
        return True
    return bool(worker.fields["beats"] < beats - MISSING_BEATS)


def _describe(rank: int, worker: WorkerHeartbeat | None, host: str) -> str:
    if worker is None:
        return f"rank {rank}"
    last = worker.fields
    return f"rank {rank} ({host}, pid {last['pid']}; last seen in {last['phase']} after step {last['step']})"
