"""Computes where the time and the money of a run went: phases of its training, node-hours and dollars by stage.

Everything is computed from records: the trainer's hours from a file for each command that trained the run and from
the newest step's record, those of the other stages from the manifests of their artifacts.

Held is the time of the commands. On a cluster nodes are held for some minutes more, while they start and end, which no
command sees. Nodes that were lost and not replaced count until their command ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusPayload
from services.common.artifacts.manifest import Phase
from services.common.artifacts.store import Artifact
from services.common.recipe.schema import Recipe, Stage, stage_nodes
from services.trainer.metrics.commands import CommandRecord, read_commands, sum_known
from services.trainer.metrics.records import read_last_step

SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True)
class StageCost:
    """Node-hours of one stage of a run, and their price."""

    stage: Stage
    held_node_hours: float
    """Hours of the stage's commands, times their nodes. A corpus or cache that other runs share counts in each run."""
    computing_node_hours: float
    """Node-hours of the steps that led to the newest state, or of the phases that made the artifact."""
    lost_node_hours: float
    """Node-hours of steps that were done again, and of the commands from the last step before a restart to the first
    one after.
    """
    chip_hours: float | None
    """Hours for which accelerators were held, times their number; None on CPUs."""
    dollars: float | None
    """Price of the held nodes on demand when their commands began; None where the type of the nodes is unknown."""
    price_source: str | None
    """Region and source of the newest command's price."""


def compute_costs(
    recipe: Recipe, corpora: Iterable[CorpusPayload], cache: Artifact[CompileCacheManifest] | None, run_folder: Path
) -> list[StageCost]:
    """Return the costs of the stages, in the order in which the stages ran."""
    commands, newest_step = read_commands(run_folder), read_last_step(run_folder) or {}
    phases: dict[Stage, Sequence[Phase]] = {"tokenizer": [phase for corpus in corpora for phase in corpus.phases]}
    if cache:
        phases["compiler"] = cache.manifest.compile_cache.phases
    costs = []
    for stage, found in phases.items():  # on CPU nodes, whose type the recipe does not name
        hours = stage_nodes(recipe, stage) * sum(phase.seconds for phase in found) / SECONDS_PER_HOUR
        costs.append(StageCost(stage, hours, hours, 0.0, chip_hours=None, dollars=None, price_source=None))
    newest = commands[-1] if commands else None
    computing, redone, restart = (
        newest.nodes * newest_step.get(name, 0.0) / SECONDS_PER_HOUR if newest else 0.0
        for name in ("productive_seconds", "redone_seconds", "restart_seconds")
    )
    training = StageCost(
        "trainer",
        held_node_hours=sum(each.node_hours for each in commands),
        computing_node_hours=computing,
        lost_node_hours=redone + restart,
        chip_hours=sum_known(each.chip_hours for each in commands),
        dollars=sum_known(each.dollars for each in commands),
        price_source=newest.price_source if newest else None,
    )
    return [*costs, training]


def divide_training(
    commands: Sequence[CommandRecord],
    events: Sequence[Mapping[str, Any]],
    attempts: Sequence[Mapping[str, Any]],
    now: float,
) -> list[Phase]:
    """Return the phases of a run's training at the time `now`, in seconds since 1970, oldest first.

    Workers that end by themselves record their start and their training as an attempt. The time of those that were
    killed is known from outside: it ends at the event of the restart, or at the end of their command.
    """
    starts = [each["started_at"] for each in attempts]
    phases = []
    for each in attempts:
        phases.append(_phase("start", each["started_at"], each["setup_seconds"]))
        phases.append(_phase("train", each["started_at"] + each["setup_seconds"], each["train_seconds"]))
    for command in commands:
        start = command.began_at
        for name, end in _ends_of_workers(command, events, now):
            if end > start and not any(start <= each < end for each in starts):
                phases.append(_phase(name, start, end - start))
            start = max(start, end)
    return sorted(phases, key=lambda phase: phase.started_at)


def _ends_of_workers(
    command: CommandRecord, events: Sequence[Mapping[str, Any]], now: float
) -> Iterator[tuple[str, float]]:
    """Yield how the workers of a command ended, and when: at each restart, and at the end of the command."""
    for event in events:
        if (event["event"], event.get("attempt")) == ("restart", command.attempt):
            yield "killed", event["time"]
    if command.exit_code is None:
        yield "running" if command.lives(now) else "killed", command.seen_at
    elif command.exit_code and command.ended_at:
        yield "failed", command.ended_at


def _phase(name: str, start: float, seconds: float) -> Phase:
    return Phase(name=name, started_at=datetime.fromtimestamp(start, UTC), seconds=seconds)
