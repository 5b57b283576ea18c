"""Computes where the time and the money of a run went: phases of its training, node-hours and dollars by stage.

Everything is computed from records: the trainer's hours from one line for each command that trained the run and from
the newest step's record, those of the other stages from the manifests of their artifacts.

Held is the time of the commands. On a cluster nodes are held for some minutes more, while they start and end, which no
command sees. Nodes that were lost and not replaced count until their command ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusPayload
from services.common.artifacts.manifest import Phase
from services.common.recipe.schema import Recipe, Stage, stage_nodes
from services.trainer.job import Job
from services.trainer.metrics.commands import CommandRecord, read_commands, sum_chip_hours, sum_cost
from services.trainer.metrics.records import read_last_step

SECONDS_PER_HOUR = 3_600
KILLED = "killed"
"""Phase of workers that ended without a record: they were killed, or their command was."""
FAILED = "failed"
"""Phase of workers that ended without a record at the end of a command that an error ended."""
RUNNING = "running"
"""Phase of the workers of a command that goes on."""


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
    recipe: Recipe,
    corpus: CorpusPayload,
    cache: CompileCacheManifest | None,
    commands: Sequence[CommandRecord],
    newest_step: Mapping[str, Any],
) -> list[StageCost]:
    """Return the costs of the stages, in the order in which the stages ran.

    `commands` are the records of the commands that trained the run, and `newest_step` is the record of its newest
    step, which is empty before the first one.
    """
    costs = [_cost_of_artifact(recipe, "tokenizer", corpus.phases)]
    if cache:
        costs.append(_cost_of_artifact(recipe, "compiler", cache.compile_cache.phases))
    nodes, price_source = (commands[-1].nodes, commands[-1].price_source) if commands else (0, None)
    computing, redone, restart = (
        nodes * newest_step.get(name, 0.0) / SECONDS_PER_HOUR
        for name in ("productive_seconds", "redone_seconds", "restart_seconds")
    )
    held = sum(each.node_hours for each in commands)
    chip_hours, dollars = sum_chip_hours(commands), sum_cost(commands)
    return [*costs, StageCost("trainer", held, computing, redone + restart, chip_hours, dollars, price_source)]


def describe_costs(job: Job) -> list[dict[str, Any]]:
    """Return the costs of a run's stages as `run.json` has them."""
    cache = job.cache.manifest if job.cache else None
    commands, newest_step = read_commands(job.run_folder), read_last_step(job.run_folder) or {}
    return [asdict(each) for each in compute_costs(job.recipe, job.corpus.payload, cache, commands, newest_step)]


def describe_training_cost(cost: StageCost) -> str:
    """Describe the cost of a run's training for a person."""
    held = cost.held_node_hours
    parts = [f"{held:,.2f} node-hours"]
    if held:
        parts.append(f"{cost.computing_node_hours / held:.1%} computing")
        parts.append(f"{cost.lost_node_hours / held:.1%} lost to restarts")
    if cost.chip_hours is not None:
        parts.append(f"{cost.chip_hours:,.1f} chip-hours")
    if cost.dollars is not None:
        parts.append(f"${cost.dollars:,.2f} on demand ({cost.price_source})")
    return ", ".join(parts)


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
            yield KILLED, event["time"]
    if command.lives(now):
        yield RUNNING, command.seen_at
    elif command.exit_code is None:
        yield KILLED, command.seen_at
    elif command.exit_code and command.ended_at:
        yield FAILED, command.ended_at


def _phase(name: str, start: float, seconds: float) -> Phase:
    return Phase(name=name, started_at=datetime.fromtimestamp(start, UTC), seconds=seconds)


def _cost_of_artifact(recipe: Recipe, stage: Stage, phases: Sequence[Phase]) -> StageCost:
    """Count the phases that made an artifact; its nodes are CPU nodes, whose type the recipe does not name."""
    hours = stage_nodes(recipe, stage) * sum(phase.seconds for phase in phases) / SECONDS_PER_HOUR
    return StageCost(stage, hours, hours, 0.0, chip_hours=None, dollars=None, price_source=None)
