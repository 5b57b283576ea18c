"""Plans partitions and encode tasks without the stage's command."""

from __future__ import annotations

from pathlib import Path

from services.common.launch import inline
from services.common.recipe.schema import Recipe
from services.tokenizer.corpus_inputs import list_corpus_inputs
from services.tokenizer.partition_plan import PlanFolder, plan_partitions
from services.tokenizer.sources.input_files import InputPartition


def write_plan(folder: Path, recipe: Recipe) -> PlanFolder:
    return plan_partitions(folder, recipe, list_corpus_inputs(recipe).listings, inline)


def plan_in(folder: Path, recipe: Recipe) -> list[InputPartition]:
    """Write a plan below `folder`, and return its partitions."""
    plan = write_plan(folder / "plan", recipe)
    return [plan.read_partition(index) for index in range(len(plan.read_partitions()))]
