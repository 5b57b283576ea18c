"""Tests of the program by torch_xla that need NeuronCores of trn1: `make test-neuron DEVICE=trn1`.

The order is that of docs/operations/first-trainium-run.md: a test relies on those before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.hardware.instance_types import read_instance_types
from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.trainer.job import Job
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.numbers import GOLDEN, OF_GOLDEN_RUN, read_numbers
from tests.hardware import work
from tests.hardware.conftest import (
    CORES_OF_A_DEVICE,
    NEURON_DEVICES,
    ON_XLA,
    read_added_graphs,
    run_stage,
    train_shipped,
    train_with_workers,
)

pytestmark = [pytest.mark.neuron, pytest.mark.timeout(4 * 3600)]

# neuronx-cc may compute float32 products in bfloat16 (its --auto-cast), whose mantissa has 8 bits.
TOLERANCE = 2**-7

NODE = read_instance_types()["trn1.32xlarge"]


def test_each_worker_opens_the_core_that_it_was_told_and_knows_the_other(tmp_path: Path) -> None:
    """torch_neuronx replaces the part of torch_xla that sets environment variables on import."""
    run_workers(inline, work.open_core, tmp_path, WorkerGroupSpec(2, 1, 2, tmp_path, device="xla"))

    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert [each["changed"] for each in found] == [{}, {}]
    assert [each["kind"] for each in found] == ["NEURON"] * 2
    assert [(each["index"], each["processes"], each["devices"]) for each in found] == [(0, 2, 2), (1, 2, 2)]


def test_steps_on_one_core_give_finite_losses_that_fall(new_job: Callable[..., Job]) -> None:
    job = new_job(**ON_XLA, train__max_steps="10")

    train_with_workers(job)

    losses = [record["loss"] for record in read_metrics(job.run_folder)]
    assert losses[0] == pytest.approx(math.log(job.recipe.model.vocab_size), rel=0.05)
    assert losses[-1] < losses[0]


def test_two_cores_that_share_the_model_give_the_losses_of_one(new_job: Callable[..., Job]) -> None:
    alone = new_job("alone", **ON_XLA, train__max_steps="3")
    shared = new_job("shared", **ON_XLA, train__max_steps="3", parallel__tensor_parallel_size="2")

    train_with_workers(alone)
    train_with_workers(shared)

    assert read_numbers(shared)["loss"] == pytest.approx(read_numbers(alone)["loss"], rel=TOLERANCE)


def test_fifty_steps_give_the_losses_of_a_cpu(new_job: Callable[..., Job]) -> None:
    job = new_job(**ON_XLA, **OF_GOLDEN_RUN)

    train_with_workers(job)

    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = read_numbers(job)
    worst = max(abs(found["loss"][step] / loss - 1) for step, loss in golden["loss"].items())
    print(f"\nlosses differ from a CPU's by at most {worst:.1e} of theirs")
    for name in ("loss", "validation_loss"):
        assert found[name] == pytest.approx(golden[name], rel=TOLERANCE), name


def test_a_warm_cache_serves_a_run_its_evaluation_and_its_continuation(tmp_path: Path) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "fsx"
    make_corpus(root, make_recipe(tmp_path))
    on_two_cores = [
        *("--parallel.device=xla", "--train.reduction=fast", "--compile.enabled=true"),
        *("--parallel.data_parallel_size=1", "--parallel.tensor_parallel_size=2"),
    ]
    warm = ["--launch", "inline", "--compile.require_warm=true"]

    run_stage("compiler", recipe, root, *on_two_cores)
    for max_steps in (20, 30):
        run_stage("trainer", recipe, root, *on_two_cores, *warm, f"--train.max_steps={max_steps}")

    [run] = [folder for folder in (root / "run").iterdir() if folder.is_dir()]
    assert [attempt["last_step"] for attempt in read_attempts(run)] == [20, 30]
    assert read_added_graphs(root) == [(0, 0)] * 2


@pytest.mark.skipif(
    0 < len(NEURON_DEVICES) * CORES_OF_A_DEVICE < NODE.workers, reason="needs the 32 NeuronCores of a trn1.32xlarge"
)
def test_throughput_of_two_layers_of_llama_2_7b(tmp_path: Path) -> None:
    """The run has the shapes of the shipped recipe, with fewer layers and nodes."""
    train_shipped(
        "recipes/llama2-7b-trn1.toml",
        tmp_path,
        NODE,
        model__num_hidden_layers="2",
        parallel__device="xla",
        parallel__data_parallel_size="4",
        batch__global_batch_size="64",
        train__max_steps="20",
    )
