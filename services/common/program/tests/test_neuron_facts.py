"""The facts that decide TorchNeuron's graphs are the same in a command and its workers, and differ with the graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import DeviceError
from services.common.program.backends.neuron_facts import (
    CACHE_VARIABLE,
    COMPILE_ONLY_VARIABLE,
    CORE_SIZE_VARIABLE,
    FLAGS_VARIABLE,
    TARGET_VARIABLE,
    cache_variables,
    compiler_facts,
    trace_variables,
)
from services.common.program.backends.neuron_xla import NeuronXla
from services.common.program.backends.slow_paths import slow_paths
from services.common.program.backends.torch_native import TorchNative
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import make_recipe

FLAG = "--model-type=transformer"


def recipe_for(folder: Path, **overrides: str) -> Recipe:
    trn2 = {"parallel__device": "neuron", "cluster__trainer_instance_type": "trn2.48xlarge"}
    return make_recipe(folder, **(trn2 | overrides))


def test_a_worker_and_a_trace_have_the_facts_of_the_command(tmp_path: Path) -> None:
    """Both get variables that the command's own environment lacks."""
    recipe = recipe_for(tmp_path, compile__flags=f'["{FLAG}"]')
    kept = cache_variables(tmp_path, recipe)
    worker = kept | {CORE_SIZE_VARIABLE: "2"}
    trace = kept | trace_variables(
        recipe.model_copy(update={"compile": recipe.compile.model_copy(update={"trace_on": "cpu"})})
    )
    assert worker == {CACHE_VARIABLE: str(tmp_path), FLAGS_VARIABLE: FLAG, CORE_SIZE_VARIABLE: "2"}
    assert trace == worker | {COMPILE_ONLY_VARIABLE: "1", TARGET_VARIABLE: "trn2"}
    assert compiler_facts(worker, recipe) == compiler_facts(trace, recipe) == compiler_facts({}, recipe)


@pytest.mark.parametrize(("workers", "size"), [(64, "2"), (128, "1")])
def test_graphs_are_for_cores_as_small_as_a_node_s_workers_need(tmp_path: Path, workers: int, size: str) -> None:
    """The launcher gives workers the same size."""
    sizes = ("parallel__data_parallel_size", "cluster__trainer_workers_per_node", "batch__global_batch_size")
    recipe = recipe_for(tmp_path, batch__micro_batch_size="1", **dict.fromkeys(sizes, str(workers)))

    assert trace_variables(recipe) == {CORE_SIZE_VARIABLE: size}
    assert compiler_facts({}, recipe)["logical_core_size"] == size


@pytest.mark.parametrize(
    ("name", "value"), [("NEURON_COMPILER_OPT_LEVEL", "1"), ("TORCH_NEURONX_ENABLE_NKI_SDPA", "0")]
)
def test_a_variable_that_changes_graphs_is_a_fact(tmp_path: Path, name: str, value: str) -> None:
    recipe = recipe_for(tmp_path)
    assert compiler_facts({name: value}, recipe) != compiler_facts({}, recipe)


@pytest.mark.parametrize(("name", "value"), [(FLAGS_VARIABLE, "-O1"), (TARGET_VARIABLE, "trn3")])
def test_a_variable_against_the_recipe_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(DeviceError, match=f"{name}=.*{value}.* unset {name}"):
        compiler_facts({name: value}, recipe_for(tmp_path))


def test_graphs_without_a_device_need_the_name_of_the_instances(tmp_path: Path) -> None:
    without = make_recipe(tmp_path, parallel__device="neuron", compile__trace_on="cpu")
    with pytest.raises(DeviceError, match=r"cluster\.trainer_instance_type") as raised:
        TorchNative.trace_environment(without)
    assert raised.value.exit_code == 4
    ultra = recipe_for(tmp_path, compile__trace_on="cpu", cluster__trainer_instance_type="trn2u.48xlarge")
    assert TorchNative.trace_environment(ultra)[TARGET_VARIABLE] == "trn2"
    assert TorchNative.trace_environment(make_recipe(tmp_path, compile__trace_on="cpu")) == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"parallel__data_parallel_size": "4"}, (0,)),
        ({"parallel__data_parallel_size": "4", "parallel__tensor_parallel_size": "2"}, (0, 2, 4, 6)),
        ({"parallel__data_parallel_size": "4", "parallel__tensor_parallel_size": "2", "parallel__device": "cpu"}, (0,)),
    ],
)
def test_one_rank_of_each_model_is_traced_where_graphs_may_list_ranks(
    tmp_path: Path, overrides: dict[str, str], expected: tuple[int, ...]
) -> None:
    recipe = recipe_for(tmp_path, **overrides)
    assert TorchNative.ranks_to_trace(recipe) == expected
    assert NeuronXla.ranks_to_trace(recipe) == (0,)
    if recipe.parallel.device == "neuron":  # a cache for other workers is another one, where graphs list workers
        assert ("data_parallel_size" in compiler_facts({}, recipe)) == (len(expected) > 1)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"corpus__sequence_length": "1024"}, ""),
        ({"corpus__sequence_length": "1000"}, "sequence_length 1,000 is no multiple of 512"),
        ({"corpus__sequence_length": "1024", "train__attention_mask": "block_causal"}, "attention_mask"),
        ({"corpus__sequence_length": "1024", "model__hidden_size": "512"}, "a head has 256 dimensions"),
        ({"corpus__sequence_length": "1000", "parallel__device": "cpu"}, ""),
    ],
)
def test_a_recipe_that_leaves_flash_attention_says_why(tmp_path: Path, overrides: dict[str, str], reason: str) -> None:
    found = slow_paths(recipe_for(tmp_path, **overrides)).get("attention", "")
    assert reason in found
    assert bool(found) == bool(reason)
