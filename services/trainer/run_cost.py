"""Computes the node-hours, chip-hours and dollars of a run by stage: held, computing, and lost to restarts.

Everything is computed again from records: the trainer's hours from one line for each command that trained the run and
from the newest step's record, and those of the other stages from the manifests of their artifacts. The reads grow with
the commands that trained the run and with the shards of its corpus, and not with its steps.

Held is the time of the commands. On a cluster nodes are held for some minutes more, while they start and end, which no
command sees. Nodes that were lost and not replaced count until their command ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusPayload
from services.common.artifacts.manifest import Phase
from services.common.recipe.schema import Recipe, Stage, stage_nodes
from services.trainer.job import Job
from services.trainer.metrics.commands import CommandRecord, read_commands, sum_chip_hours, sum_cost
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
    made: list[tuple[Stage, tuple[Phase, ...]]] = [("tokenizer", tuple(corpus.phases))]
    if cache:
        made.append(("compiler", tuple(cache.compile_cache.phases)))
    return [
        *(_cost_of_artifact(recipe, stage, phases) for stage, phases in made),
        _cost_of_training(commands, newest_step),
    ]


def describe_costs(job: Job) -> list[dict[str, Any]]:
    """Return the costs of a run's stages as `run.json` has them."""
    cache = job.cache.manifest if job.cache else None
    commands, newest_step = read_commands(job.run_folder), read_last_step(job.run_folder) or {}
    found = compute_costs(job.recipe, job.corpus.payload, cache, commands, newest_step)
    return [asdict(each) for each in found]


def describe_training_cost(cost: StageCost) -> str:
    """Describe the cost of a run's training for a person."""
    shares = [
        f"{hours / cost.held_node_hours:.1%} {what}"
        for hours, what in ((cost.computing_node_hours, "computing"), (cost.lost_node_hours, "lost to restarts"))
        if cost.held_node_hours
    ]
    parts = [f"{cost.held_node_hours:,.2f} node-hours", *shares]
    if cost.chip_hours is not None:
        parts.append(f"{cost.chip_hours:,.1f} chip-hours")
    if cost.dollars is not None:
        parts.append(f"${cost.dollars:,.2f} on demand ({cost.price_source})")
    return ", ".join(parts)


def _cost_of_artifact(recipe: Recipe, stage: Stage, phases: tuple[Phase, ...]) -> StageCost:
    """Count the phases that made an artifact; its nodes are CPU nodes, whose type the recipe does not name."""
    hours = stage_nodes(recipe, stage) * sum(phase.seconds for phase in phases) / SECONDS_PER_HOUR
    return StageCost(stage, hours, hours, 0.0, chip_hours=None, dollars=None, price_source=None)


def _cost_of_training(commands: Sequence[CommandRecord], newest: Mapping[str, Any]) -> StageCost:
    nodes = commands[-1].nodes if commands else 0
    hours = [
        nodes * newest.get(name, 0.0) / SECONDS_PER_HOUR
        for name in ("productive_seconds", "redone_seconds", "restart_seconds")
    ]
    return StageCost(
        stage="trainer",
        held_node_hours=sum(each.node_hours for each in commands),
        computing_node_hours=hours[0],
        lost_node_hours=hours[1] + hours[2],
        chip_hours=sum_chip_hours(commands),
        dollars=sum_cost(commands),
        price_source=commands[-1].price_source if commands else None,
    )
