"""Records when the trainer's commands began, lived and ended, and what their nodes cost, in `commands/00001.json`.

Each command that trains a run has one file, which it keeps up to date in place, so that a full disk does not keep it
from recording its end: `seen_at` while it lives, and `ended_at` and `exit_code` at its end. A command that was killed
leaves the time at which it was last seen.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from services.common.hardware.instance_types import read_instance_types
from services.common.launch.launcher import INLINE
from services.common.process.background_thread import running_in_background
from services.common.process.entry_point import exit_code_for
from services.common.process.telemetry import overwrite
from services.common.recipe.schema import stage_nodes
from services.trainer.job import Job

logger = logging.getLogger(__name__)

FOLDER = "commands"
RECORD_BYTES = 4_096
SEEN_SECONDS = 10.0
"""Seconds between two updates of `seen_at`."""
LOST_SECONDS = 180.0
"""Seconds without an update after which a command on another node counts as lost. Its clock may differ by as much."""
_ERROR_CHARACTERS = 240


class CommandRecord(BaseModel):
    """A command that trained a run: its life, and the nodes that it held. Times are in seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    attempt: str
    """Unique name of the command: `Job.attempt`."""
    node: str
    pid: int
    began_at: float
    seen_at: float
    """Newest time at which the command lived."""
    nodes: int
    workers: int
    instance_type: str | None
    chips_per_node: int | None
    """Accelerators of a node; None if the command computes on CPUs."""
    dollars_per_node_hour: float | None
    """Approximate on-demand price of a node when the command began; None without an instance type."""
    price_source: str | None
    ended_at: float | None = None
    """None while the command runs, and for a command that was killed, as is `exit_code`."""
    exit_code: int | None = None
    error: str | None = None
    """Start of the message of the error that ended the command."""

    @property
    def node_hours(self) -> float:
        """Hours for which the command held its nodes, until its end or until it was last seen, times the nodes."""
        return self.nodes * max(0.0, (self.ended_at or self.seen_at) - self.began_at) / 3_600

    @property
    def chip_hours(self) -> float | None:
        """Hours for which the command held accelerators, times their number; None on CPUs."""
        return None if self.chips_per_node is None else self.node_hours * self.chips_per_node

    @property
    def dollars(self) -> float | None:
        """Price of the nodes that the command held; None where it is unknown."""
        return None if self.dollars_per_node_hour is None else self.node_hours * self.dollars_per_node_hour

    def lives(self, now: float) -> bool:
        """Tell whether the command runs at the time `now`.

        It does if its record was updated within LOST_SECONDS, and a process of this node still exists.
        """
        if self.ended_at is not None or now - self.seen_at >= LOST_SECONDS:
            return False
        return self.node != socket.gethostname() or psutil.pid_exists(self.pid)


@contextmanager
def recording_command(job: Job) -> Iterator[None]:
    """Record this command's life during the block, and the exit code of the error that ends it.

    The caller holds the run's lock. A record that cannot be written is logged, and the run goes on.
    """
    folder, record = job.run_folder / FOLDER, _describe(job)
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir())) + 1:05d}.json"

    def update(**fields: Any) -> None:
        content = record.model_copy(update={"seen_at": time.time(), **fields}).model_dump_json()
        try:
            overwrite(path, content.encode(), RECORD_BYTES)
        except OSError as error:
            logger.warning("%s: the command's record could not be written: %s", path, error)

    def keep_seen(is_over: threading.Event) -> None:
        while not is_over.wait(SEEN_SECONDS):
            update()

    update()
    exit_code, message = 0, None
    try:
        with running_in_background(keep_seen, "command-record"):
            yield
    except BaseException as error:
        exit_code, message = exit_code_for(error), str(error)[:_ERROR_CHARACTERS]
        raise
    finally:
        update(ended_at=time.time(), exit_code=exit_code, error=message)


def read_commands(run_folder: Path) -> list[CommandRecord]:
    """Return the records of the run's commands, oldest first, without those that cannot be read."""
    found = []
    for path in sorted((run_folder / FOLDER).glob("*.json")):
        with suppress(ValidationError):  # a killed command left it unfinished
            found.append(CommandRecord.model_validate_json(path.read_bytes()))
    return found


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of values; None if one is unknown or there is none."""
    found = list(values)
    known = [each for each in found if each is not None]
    return math.fsum(known) if known and len(known) == len(found) else None


def _describe(job: Job) -> CommandRecord:
    recipe = job.recipe
    name = recipe.cluster.trainer_instance_type
    node = read_instance_types()[name] if name else None
    is_one_node, workers = job.launch == INLINE, recipe.parallel.num_workers
    workers_per_node = workers if is_one_node else recipe.cluster.trainer_workers_per_node
    return CommandRecord(
        attempt=job.attempt,
        node=socket.gethostname(),
        pid=os.getpid(),
        began_at=job.started_at.timestamp(),
        seen_at=time.time(),
        nodes=1 if is_one_node else stage_nodes(recipe, "trainer"),
        workers=workers,
        instance_type=name,
        chips_per_node=node.chips if node else workers_per_node if recipe.parallel.device == "cuda" else None,
        dollars_per_node_hour=node.dollars_per_hour if node else None,
        price_source=node.price_source if node else None,
    )
