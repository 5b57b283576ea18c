"""Nodes, batches and other numbers follow from a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.recipe.cluster import Cluster
from services.common.recipe.derived import derive
from services.common.recipe.schema import stage_nodes
from services.common.testing.recipes import load_small, make_recipe


def test_derived_numbers_follow_from_the_recipe(tmp_path: Path) -> None:
    rows = derive(make_recipe(tmp_path, parallel__data_parallel_size="2"), None)

    assert rows["tokens per step"] == "128"
    assert rows["tokens in max_steps"] == "2,560"
    assert rows["micro-batches per step"] == "4 (2 per worker)"


@pytest.mark.parametrize(
    ("evaluation_tokens", "expected"),
    [
        ("0", "none"),
        ("590", "592 tokens every 10 steps, 13.4% of all operations"),  # rows of 16; 1,280 trained tokens in 10 steps
    ],
)
def test_a_dry_run_shows_the_share_of_evaluations(tmp_path: Path, evaluation_tokens: str, expected: str) -> None:
    changed = {"train__evaluation_tokens": evaluation_tokens, "train__evaluation_interval_steps": "10"}

    assert derive(make_recipe(tmp_path, **changed), None)["evaluation"] == expected


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ({}, ()),
        ({"train.max_steps": "30"}, ("30", "20", "last 10 steps", "0.001")),
        ({"train.max_steps": "30", "optimizer.min_learning_rate": "0"}, ("last 10 steps", "changes no weight")),
        ({"train.max_steps": "15"}, ("15", "20", "5 steps before", "0.001")),
    ],
)
def test_a_run_that_does_not_end_with_its_schedule_is_warned_of(
    tmp_path: Path, overrides: dict[str, str], numbers: tuple[str, ...]
) -> None:
    warning = derive(load_small(tmp_path, overrides), None).get("warning, schedule", "")

    assert bool(warning) == bool(numbers)
    assert all(number in warning for number in numbers)


@pytest.mark.parametrize(("workers_per_node", "nodes"), [("1", 4), ("2", 2), ("4", 1)])
def test_the_trainers_nodes_follow_from_its_workers(tmp_path: Path, workers_per_node: str, nodes: int) -> None:
    workers = {"parallel.data_parallel_size": "4", "cluster.trainer_workers_per_node": workers_per_node}
    recipe = load_small(tmp_path, workers)

    assert stage_nodes(recipe, "trainer") == nodes
    assert derive(recipe, None)["nodes on a cluster"] == f"tokenizer 1, compiler 1, trainer {nodes}"


def test_the_compilers_nodes_are_said_or_follow_from_its_tasks(tmp_path: Path) -> None:
    tasks = {"compile.num_workers": "8", "parallel.device": "xla", "train.reduction": "fast"}
    said = load_small(tmp_path, tasks | {"cluster.compiler_nodes": "1"})

    assert "as many as 8 tasks" in derive(load_small(tmp_path, tasks), None)["nodes on a cluster"]
    assert "compiler 1," in derive(said, None)["nodes on a cluster"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ()),
        ({"cluster.min_nodes": "1"}, (4, 2, 1)),
        ({"cluster.min_nodes": "3"}, (4,)),
        ({"cluster.min_nodes": "8"}, ()),
        ({"cluster.min_nodes": "1", "cluster.trainer_workers_per_node": "4"}, (1,)),
        ({"cluster.min_nodes": "1", "batch.global_batch_size": "24", "train.reduction": "fast"}, (6, 4, 3, 2, 1)),
    ],
)
def test_a_gang_that_lost_a_node_goes_on_with_as_many_as_share_the_batch(
    tmp_path: Path, overrides: dict[str, str], expected: tuple[int, ...]
) -> None:
    eight = {"batch.micro_batch_size": "2", "batch.global_batch_size": "16", "parallel.data_parallel_size": "8"}
    if overrides.get("train.reduction") == "fast":
        eight |= {"parallel.data_parallel_size": "12"}

    recipe = load_small(tmp_path, eight | overrides)
    workers, micro_batches = recipe.parallel.data_parallel_size, recipe.batch.num_micro_batches

    assert recipe.cluster.fewer_nodes(workers, 1, micro_batches) == expected


def test_a_gang_of_split_models_goes_on_with_whole_ones(tmp_path: Path) -> None:
    cluster = Cluster(trainer_workers_per_node=2, min_nodes=1)

    assert cluster.fewer_nodes(num_workers=16, tensor_parallel_size=4, num_micro_batches=8) == (4, 2)
    assert cluster.fewer_nodes(num_workers=16, tensor_parallel_size=1, num_micro_batches=8) == (4, 2, 1)
