"""Tests of the program by TorchNeuron on trn2 and trn3: `make test-neuron`.

Their order is that of docs/operations/first-trainium-run.md, whose points they settle: a test relies on those before
it. On a machine without NeuronCores they run on the stand-in for TorchNeuron, with 4 workers and smaller models: that
shows that the tests are right, and nothing of the device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from services.common.hardware.instance_types import read_instance_types
from services.common.testing.commands import run_python
from services.common.testing.recipes import load_with, recipe_text
from services.common.testing.seeds import draw_seed
from services.common.testing.torch_neuron.package import write_package
from services.common.testing.waiting import wait_until
from services.trainer.tests.builders import make_corpus
from services.trainer.tests.runs import REPOSITORY, checkpoints, read_run, start_trainer, workers_of
from tests.hardware.conftest import NEURON_DEVICES, read_added_graphs, run_stage, train_shipped
from tests.hardware.work import Case

IS_REAL = bool(NEURON_DEVICES)
NODE = read_instance_types()["trn2.48xlarge"]
CORES = NODE.workers // NODE.chips * (len(NEURON_DEVICES) or 1)
"""Logical NeuronCores of this machine, or those of one chip on the stand-in."""

pytestmark = [
    pytest.mark.neuron if IS_REAL else pytest.mark.slow,
    pytest.mark.timeout(4 * 3600 if IS_REAL else 900),
    pytest.mark.skipif(
        not IS_REAL and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot make a device in Python, which 2.13 can",
    ),
]

TOLERANCE = 1e-4 if IS_REAL else 1e-6
"""Largest relative difference of a loss in float32: neuronx-cc does not round products with `--auto-cast=none`."""
EAGER = {"compile__enabled": "false", "train__reduction": "fast"}
COMPILED = {"compile__enabled": "true", "train__reduction": "fast"}
FOUR_HEADS = {"model__num_attention_heads": "4", "model__num_key_value_heads": "4"}
"""Overrides with which 4 workers can share a model."""
SHARED_MODEL = {
    "model__num_attention_heads": 4,
    "model__num_key_value_heads": 4,
    "batch__global_batch_size": max(8, CORES // 2),
    "parallel__data_parallel_size": CORES // 4,
    "parallel__tensor_parallel_size": 4,
    "parallel__zero_stage": 1,
    "train__reduction": "fast",
}
"""Changes of the small recipe, whose steps are compiled, for workers of which 4 share a model."""
FLASH = {
    "model__num_attention_heads": "2",
    "model__num_key_value_heads": "1",
    "corpus__sequence_length": "512",
    "model__hidden_size": "256",
    "model__intermediate_size": "512",
    "batch__micro_batch_size": "1",
    "batch__global_batch_size": "2",
}
"""Overrides with the shapes that TorchNeuron's flash attention takes: 512 positions, and heads of 128."""


@pytest.fixture(scope="module", autouse=True)
def torch_neuron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the processes of these tests find the stand-in's package where there is no device."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_REAL:
            patch.setenv("PYTHONPATH", str(write_package(tmp_path_factory.mktemp("stand-in"))))
        yield


def run_workers(name: str, folder: Path, case: Case) -> list[Any]:
    """Run a program of `work` in a process of its own, and return what each rank wrote."""
    case.write(folder)
    cache = {"TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "cache")}
    done = run_python(["-m", "tests.hardware.work", name, str(folder)], **cache)
    assert done.returncode == 0, done.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(case.num_workers)]


def compare_with_a_cpu(folder: Path, case: Case) -> None:
    """Run steps on the device and on the CPU, and compare the numbers and the state of every rank."""
    found, expected = (run_workers("steps", folder / each.device, each) for each in (case, replace(case, device="cpu")))
    worst: tuple[float, str] = (0.0, "")
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        for name, values in there["numbers"].items():
            for at, (x, y) in enumerate(zip(here["numbers"][name], values, strict=True)):
                worst = max(worst, (abs(x / y - 1), f"{name} {at} of rank {rank}: {x}, and {y} on the CPU"))
        assert here["state"].keys() == there["state"].keys()
    print(f"\nlargest relative difference {worst[0]:.1e}: {worst[1]}")
    print(f"operations that fell back to the CPU: {', '.join(found[0]['fallbacks']) or 'none reported'}")
    assert worst[0] <= TOLERANCE, worst[1]
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        for key, tensor in there["state"].items():
            # AdamW divides by the root of the second moment, so a rounding of a tiny gradient may change its sign.
            error = (here["state"][key] - tensor).abs().max().item()
            assert error <= 10 * TOLERANCE * max(1.0, tensor.abs().max().item()), f"{key} of rank {rank}: {error}"


def write_root(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a recipe beside a root with its corpus, and return the paths of both."""
    folder.mkdir()
    path = folder / "small.toml"
    path.write_text(recipe_text(parallel__device="neuron", **changes), encoding="utf-8")
    make_corpus(folder / "fsx", load_with(path))
    return path, folder / "fsx"


def test_doctor_finds_a_core_for_every_worker(tmp_path: Path) -> None:
    """Settles point 20."""
    recipe, root = write_root(tmp_path / "doctor", parallel__data_parallel_size=CORES, compile__enabled=False)

    shown = run_stage("trainer doctor", recipe, root, "--launch", "inline")

    print(shown)
    assert "NeuronCores" in shown


@pytest.mark.parametrize(
    "case",
    [
        Case("neuron", CORES // 4, 4),
        Case("neuron", CORES // 4, 4, key_value_copies=2),
        pytest.param(Case("neuron", CORES), marks=pytest.mark.skipif(not IS_REAL, reason="as the first on a stand-in")),
    ],
    ids=["four a model", "pairs with the same key-value heads", "all with a model each"],
)
def test_every_collective_is_right_along_every_axis(tmp_path: Path, case: Case) -> None:
    """Settles point 21."""
    results = run_workers("collectives", tmp_path / "collectives", case)

    assert {name for each in results for name in each["wrong"]} == set()
    assert len(results[0]["done"]) >= 16


@pytest.mark.parametrize(("layers", "steps"), [("1", 1), ("2", 10)], ids=["one_step_of_one_layer", "ten_steps_of_two"])
def test_one_core_gives_the_losses_of_a_cpu(tmp_path: Path, layers: str, steps: int) -> None:
    """Settles points 22 and 23, operation by operation."""
    compare_with_a_cpu(tmp_path, Case("neuron", steps=steps, overrides=EAGER | {"model__num_hidden_layers": layers}))


@pytest.mark.parametrize("cores", [4, pytest.param(CORES, marks=pytest.mark.skipif(CORES == 4, reason="one chip"))])
def test_every_rank_computes_what_it_computes_on_a_cpu(tmp_path: Path, cores: int) -> None:
    """Settles point 24: the same layout on gloo, compared rank by rank."""
    batch = {"batch__micro_batch_size": "1", "batch__global_batch_size": f"{max(8, cores // 4)}"}
    compare_with_a_cpu(
        tmp_path,
        Case("neuron", cores // 4, 4, steps=3, overrides=EAGER | FOUR_HEADS | batch | {"parallel__zero_stage": "1"}),
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_steps_with_flash_attention_give_the_losses_of_a_cpu(tmp_path: Path, checkpointing: str) -> None:
    """Settles point 25. The CPU computes operation by operation."""
    overrides = FLASH | {"train__activation_checkpointing": checkpointing}
    case = Case("neuron", steps=3, overrides=overrides | COMPILED)
    found = run_workers("steps", tmp_path / "neuron", case)
    expected = run_workers("steps", tmp_path / "cpu", replace(case, device="cpu", overrides=overrides | EAGER))

    assert found[0]["numbers"]["loss"] == pytest.approx(expected[0]["numbers"]["loss"], rel=TOLERANCE)


def test_all_ranks_find_the_graphs_that_one_traced_and_a_continuation_compiles_nothing(tmp_path: Path) -> None:
    """Settles points 26 and 29: with a graph for each rank, the first training would end with 4."""
    recipe, root = write_root(tmp_path / "warm", **SHARED_MODEL)
    warm = ("--launch=inline", "--compile.require_warm=true")

    run_stage("compiler", recipe, root)
    for max_steps in (4, 6):
        run_stage("trainer", recipe, root, *warm, f"--train.max_steps={max_steps}")

    assert read_added_graphs(root) == [(0, 0)] * 2


def test_four_cores_that_share_a_compiled_model_give_the_losses_of_one(tmp_path: Path) -> None:
    """Settles point 27."""
    alone, shared = (
        run_workers("steps", tmp_path / name, Case("neuron", 1, parts, steps=3, overrides=COMPILED | FOUR_HEADS))
        for name, parts in (("alone", 1), ("shared", 4))
    )

    assert shared[0]["numbers"]["loss"] == pytest.approx(alone[0]["numbers"]["loss"], rel=10 * TOLERANCE)


def test_a_killed_worker_costs_no_graph_and_no_step(tmp_path: Path) -> None:
    """Settles point 28: the others notice, all start again, and their cores can be opened again."""
    recipe, root = write_root(tmp_path / "killed", **SHARED_MODEL)
    steps = 40 if IS_REAL else 12
    options = (f"--train.max_steps={steps}", "--checkpoint.interval_steps=2", "--compile.require_warm=true")
    run_stage("compiler", recipe, root, *options)

    process = start_trainer(recipe, root, *options, temporary=tmp_path)
    wait_until(lambda: checkpoints(root), 1800, process=process)
    random.Random(draw_seed()).choice(workers_of(process)).kill()
    output, _ = process.communicate(timeout=1800)

    assert process.returncode == 0, output
    assert "resuming after" in read_run(root).starts[-1]
    assert [record["step"] for record in read_run(root).records] == list(range(1, steps + 1))
    assert set(read_added_graphs(root)) == {(0, 0)}


LLAMA_3 = "recipes/llama3.1-8b-trn2.toml"
NARROW = {
    "corpus__sequence_length": "512",
    "model__hidden_size": "256",
    "model__intermediate_size": "512",
    "model__num_attention_heads": "8",
    "model__num_key_value_heads": "4",
}
"""Overrides of the shipped recipe for the stand-in."""


def test_two_layers_of_llama_3_1_8b_train_on_rows_of_8192_tokens(tmp_path: Path) -> None:
    """Settles point 30 with neuron-monitor beside it: does the memory of a core hold what `plan` says?"""
    train_shipped(
        LLAMA_3,
        tmp_path,
        NODE,
        **({} if IS_REAL else NARROW),
        model__num_hidden_layers="2",
        parallel__data_parallel_size="1",
        cluster__trainer_workers_per_node="4",
        batch__global_batch_size="4",
        train__max_steps="20" if IS_REAL else "2",
    )


@pytest.mark.skipif(NODE.workers > CORES, reason="needs the 64 logical NeuronCores of a trn2.48xlarge")
@pytest.mark.parametrize("workers", [64, 128], ids=["64_workers", "128_workers"])
def test_throughput_of_llama_3_1_8b_on_one_node(tmp_path: Path, workers: int) -> None:
    """Settles points 31 and 32, with all layers of the shipped recipe in 16 models: of 4 workers with two physical
    cores each, and of 8 with one.
    """
    train_shipped(
        LLAMA_3,
        tmp_path,
        NODE,
        parallel__data_parallel_size="16",
        parallel__tensor_parallel_size=f"{workers // 16}",
        cluster__trainer_workers_per_node=f"{workers}",
        batch__global_batch_size="256",
        train__max_steps="20",
    )


def test_two_layers_of_llama_3_70b_compile_at_full_width(tmp_path: Path) -> None:
    """32 workers share a model, of which the stage traces one after the other: its memory is that of one worker."""
    cut = ("--model.num_hidden_layers=2", "--corpus.sequence_length=512", "--compile.trace_on=cpu")
    shown = run_stage(
        "compiler",
        REPOSITORY / "recipes/llama3-70b-trn2.toml",
        tmp_path / "fsx",
        *(*cut, "--parallel.data_parallel_size=2", "--batch.global_batch_size=4"),
    )

    print(shown)
    assert "a second process compiled 0" in shown
