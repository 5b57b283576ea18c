"""Workers' heartbeats: files that tell, after a loss, whether a step hung and which ranks were silent.

    <run_folder>/heartbeats/rank-00003.json     a JSON object of HEARTBEAT_BYTES

Each worker overwrites its own file in place; the command reads the files after a loss. Clocks of nodes are not
compared: each worker counts the seconds since its own start, and workers start together.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from services.common.process.telemetry import overwrite, parse_json_line
from services.trainer.job import Job, rank_log

FOLDER = "heartbeats"
HEARTBEAT_SECONDS = 2.0
HEARTBEAT_BYTES = 512
STEP = "step"
"""Phase of a heartbeat that has a limit."""
BETWEEN_PHASES = "between phases"


class Hang(NamedTuple):
    """A step that took longer than its limit."""

    rank: int
    """Lowest rank that waited for longer than the limit."""
    step: int
    """Number of the step, from 1."""
    seconds: float
    silent_ranks: list[int]
    message: str


def heartbeat_seconds(limit_seconds: float | None) -> float:
    """Return the seconds between two heartbeats, of which a step with a short limit has four."""
    return HEARTBEAT_SECONDS if limit_seconds is None else min(HEARTBEAT_SECONDS, limit_seconds / 4)


def write_heartbeat(run_folder: Path, fields: dict[str, Any]) -> None:
    """Replace the heartbeat of the rank in `fields`. Raises `OSError`."""
    overwrite(_heartbeat_file(run_folder, fields["rank"]), json.dumps(fields).encode(), HEARTBEAT_BYTES)


def forget_heartbeats(run_folder: Path) -> None:
    """Remove the heartbeats of an earlier command, which may have had more workers."""
    shutil.rmtree(run_folder / FOLDER, ignore_errors=True)


def heartbeat_times(run_folder: Path) -> dict[str, int]:
    """Return the time at which each file last changed, by its name, by other machines' clocks. Raises `OSError`."""
    with os.scandir(run_folder / FOLDER) as files:
        return {file.name: file.stat().st_mtime_ns for file in files}


def read_heartbeats(job: Job) -> dict[int, dict[str, Any]]:
    """Return the newest heartbeat of each rank that has one of this start of the workers."""
    found = {}
    for rank in range(job.recipe.parallel.num_workers):
        with suppress(OSError):
            fields = parse_json_line(_heartbeat_file(job.run_folder, rank).read_bytes()) or {}
            if (fields.get("attempt"), fields.get("start")) == (job.attempt, job.start_number):
                found[rank] = fields
    return found


def read_phase(run_folder: Path) -> str:
    """Return what rank 0 does besides steps, such as `evaluation`; empty in a step, and where that is unknown."""
    with suppress(OSError):
        fields = parse_json_line(_heartbeat_file(run_folder, 0).read_bytes()) or {}
        return "" if fields.get("phase") in (STEP, BETWEEN_PHASES) else str(fields.get("phase", ""))
    return ""


def find_hang(job: Job) -> Hang | None:
    """Return the hang with which this start of the workers ended; None where it ended otherwise."""
    found = read_heartbeats(job)
    late = [rank for rank, fields in found.items() if _is_late(fields)]
    if not late:
        return None
    rank = late[0]
    step, limit = found[rank]["step"] + 1, found[rank]["limit_seconds"]
    seconds = max(limit, found[rank]["phase_seconds"])  # the newest heartbeat is older than the end
    # The others waited for about the whole limit, and the newest heartbeat of each is at most a quarter of it old.
    oldest = max(fields["alive_seconds"] for fields in found.values()) - limit / 2
    alive = {each for each, fields in found.items() if fields["alive_seconds"] >= oldest}
    silent = [each for each in range(job.recipe.parallel.num_workers) if each not in alive]
    hosts = [f"rank {each}" + (f" ({found[each]['host']})" if each in found else "") for each in silent]
    message = (
        f"rank {rank}: step {step} has taken {seconds:.0f} s, the limit is {limit:.0f} s (the larger of "
        f"train.watchdog_min_seconds and {job.recipe.train.watchdog_factor:g} median steps). Without a heartbeat: "
        f"{', '.join(hosts) or 'no rank'}. Stacks are in {rank_log(job.run_folder, rank)}."
    )
    return Hang(rank, step, seconds, silent, message)


def _is_late(fields: dict[str, Any]) -> bool:
    """Whether a worker waited in a step up to its limit: its newest heartbeat is about one interval older."""
    limit = fields["limit_seconds"]
    if fields["phase"] != STEP or limit is None:
        return False
    return bool(fields["phase_seconds"] >= limit - 1.5 * heartbeat_seconds(limit))


def _heartbeat_file(run_folder: Path, rank: int) -> Path:
    return run_folder / FOLDER / f"rank-{rank:05d}.json"
