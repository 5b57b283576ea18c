"""A model that is split over workers trains as it does on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec
from services.common.program.layers import Layout, split
from services.common.program.llama import Llama, initialize
from services.common.program.mesh import Mesh
from services.common.program.tests import work
from services.common.testing.recipes import make_recipe

Results = dict[str, dict[str, list[float]]]


def without_held(results: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: values for name, values in results.items() if name != "held"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return work.train_on(Mesh(0, data_parallel_size=1), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each of 4 workers found, on each mesh."""
    folder = tmp_path_factory.mktemp("together")
    inline.run_workers(work.train_on_all, folder, WorkerGroupSpec(work.WORKERS, 1, work.WORKERS, folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(work.WORKERS)]


def test_four_data_parallel_workers_have_the_bits_of_one(
    alone: dict[str, list[float]], together: list[Results]
) -> None:
    for name in ("data 4", "data 4" + work.SHARDED):
        for results in together:
            assert without_held(results[name]) == without_held(alone), name


@pytest.mark.parametrize("mesh", [name for name, (data, _) in work.MESHES.items() if data > 1])
def test_sharded_optimizers_have_the_same_bits_in_a_share_of_the_memory(together: list[Results], mesh: str) -> None:
    num_shares, _ = work.MESHES[mesh]
    for results in together:
        whole, sharded = results[mesh], results[mesh + work.SHARDED]
        assert without_held(sharded) == without_held(whole)
        assert sharded["held"][0] * num_shares == whole["held"][0]


@pytest.mark.parametrize("mesh", [name for name, (_, tensor) in work.MESHES.items() if tensor > 1])
def test_a_split_model_trains_as_one_that_is_whole(
    alone: dict[str, list[float]], together: list[Results], mesh: str
) -> None:
    for results in together:
        for name in ("loss", "gradient_norm", "evaluation"):
            assert results[mesh][name] == together[0][mesh][name]
            assert results[mesh][name] == pytest.approx(alone[name], rel=2e-6, abs=0), name


@pytest.mark.parametrize("mesh", [name for name, (_, tensor) in work.MESHES.items() if tensor > 1])
def test_activation_checkpointing_has_the_same_bits_on_a_split_model(together: list[Results], mesh: str) -> None:
    assert all(results[mesh + work.RECOMPUTED] == results[mesh] for results in together)


@pytest.mark.parametrize("tensor_parallel_size", [2, 4])
def test_the_parts_of_a_weight_are_those_of_the_whole(tmp_path: Path, tensor_parallel_size: int) -> None:
    recipe = make_recipe(tmp_path, model__num_attention_heads="8", model__num_key_value_heads="2")
    whole = Llama(recipe.model, 16)
    initialize(whole, recipe.model, seed=3)

    class OfRank(type(whole.collectives)):  # type: ignore[misc]
        def __init__(self, rank: int) -> None:
            self.mesh = Mesh(rank, 1, tensor_parallel_size, max(1, tensor_parallel_size // 2))

    parts = [Llama(recipe.model, 16, OfRank(rank)) for rank in range(tensor_parallel_size)]
    for part in parts:
        initialize(part, recipe.model, seed=3)

    for name, full in whole.named_parameters():
        layout = parts[0].layouts()[name]
        copies = tensor_parallel_size // layout.num_parts
        slices = [part.get_parameter(name).detach() for part in parts]
        assert all(torch.equal(slices[n], slices[n - n % copies]) for n in range(tensor_parallel_size)), name
        joined = torch.cat(slices[::copies], layout.dim) if layout.dim is not None else slices[0]
        assert torch.equal(joined, full), name


def test_copies_of_a_part_lie_on_neighbours() -> None:
    layouts = [split(Mesh(rank, 1, 4, key_value_copies=2), dim=0, copies="key_value") for rank in range(4)]

    assert layouts == [Layout(0, 2, part, "key_value") for part in (0, 0, 1, 1)]
    assert split(Mesh(1, 1, 4, key_value_copies=4), 0, "key_value") == Layout(sum_axis="key_value")
    assert split(Mesh(0, 4), 0, "key_value") == Layout()
