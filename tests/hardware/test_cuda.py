"""Tests of the program that need one or several NVIDIA GPUs: `make test-cuda`.

The tests share two runs of the demo's recipe, on the CPU and on the GPU.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.store import open_artifact
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.testing.recipes import make_recipe
from services.common.testing.waiting import wait_until
from services.trainer.job import Job
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests.numbers import read_numbers
from services.trainer.tests.runs import REPOSITORY, checkpoints, run_trainer, start_trainer, state_hash
from tests.hardware.conftest import run_stage, train_with_workers

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(1800)]

ON_CUDA = {"parallel__device": "cuda", "parallel__data_parallel_size": "1"}
"""Overrides with which the small recipe has one worker, on a GPU."""
NUM_STEPS, CHECKPOINT_STEPS = 300, 100  # of the demo


RECIPE = REPOSITORY / "recipes/tiny-cuda.toml"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with a run of the demo on the CPU, and one on the GPU."""
    root = tmp_path_factory.mktemp("demo") / "fsx"
    run_stage("tokenizer", REPOSITORY / "recipes/tiny-cpu.toml", root)  # the recipes share their corpus
    with ThreadPoolExecutor() as pool:
        devices = [pool.submit(compile_and_train, name, root) for name in ("tiny-cpu", "tiny-cuda")]
        for device in devices:
            device.result()
    return root


def compile_and_train(name: str, root: Path) -> None:
    recipe = REPOSITORY / f"recipes/{name}.toml"
    run_stage("compiler", recipe, root)
    run_stage("trainer", recipe, root, "--launch", "inline", "--compile.require_warm=true")


def test_the_demo_ends_with_the_losses_of_a_cpu(demo: Path) -> None:
    [on_cpu], [on_cuda] = demo.glob("run/tiny-cpu-*"), demo.glob("run/tiny-cuda-*")
    for name in ("loss", "validation_loss"):
        expected, found = (
            {record["step"]: record[name] for record in read_metrics(run) if name in record}
            for run in (on_cpu, on_cuda)
        )
        assert found.keys() == expected.keys()
        worst = max(found, key=lambda step: abs(found[step] / expected[step] - 1))
        print(f"\n{name} differs most at step {worst}: {found[worst]} on the GPU, {expected[worst]} on the CPU")
        assert found[NUM_STEPS] == pytest.approx(expected[NUM_STEPS], rel=1e-3), name


def test_the_compiler_s_cache_serves_all_of_the_demo(demo: Path) -> None:
    [cache] = (path.parent for path in demo.glob("compile_cache/cuda/*/manifest.json"))
    payload = open_artifact(cache, CompileCacheManifest).manifest.compile_cache
    [run] = demo.glob("run/tiny-cuda-*")
    attempts = read_attempts(run)

    assert payload.target == "cuda"
    assert payload.graphs_compiled > 0
    assert [(each["graphs_compiled"], each["new_cache_files"]) for each in attempts] == [(0, 0)]


def test_a_kill_leaves_the_bits_of_a_run_that_was_let_alone(demo: Path, tmp_path: Path) -> None:
    root = tmp_path / "fsx"
    root.mkdir()
    for collection in ("corpus", "compile_cache"):
        (root / collection).symlink_to(demo / collection)
    killed = start_trainer(RECIPE, root)
    wait_until(lambda: checkpoints(root), 600, process=killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    begun = set(checkpoints(root))

    exit_code, output = run_trainer(RECIPE, root)

    assert exit_code == 0, output
    assert begun <= {f"step-{step:08}" for step in range(CHECKPOINT_STEPS, NUM_STEPS, CHECKPOINT_STEPS)}
    last = f"step-{NUM_STEPS:08}"
    [expected] = demo.glob(f"checkpoint/tiny-cuda-*/{last}")
    assert state_hash(checkpoints(root)[last]) == state_hash(expected)


def test_a_snapshot_has_the_bits_of_its_step_while_the_gpu_goes_on(tmp_path: Path) -> None:
    """The state is so large that the next step starts before the copy ends."""
    wide = {"model__hidden_size": "1024", "model__intermediate_size": "4096", "model__num_attention_heads": "8"}
    recipe = make_recipe(tmp_path, **ON_CUDA, **wide, compile__enabled="false")
    program = Program(recipe, TorchNative(Mesh(0, data_parallel_size=1), 1, "exact", "cuda"))
    program.train_step(0, micro_batches_of(recipe, 0))
    expected = {piece: tensor.clone() for piece, tensor in program.state.read().items()}

    snapshot = program.state.start_snapshot()
    for step in range(1, 4):
        program.train_step(step, micro_batches_of(recipe, step))
    found = snapshot()

    assert all(torch.equal(found[piece], tensor) for piece, tensor in expected.items())


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("mask", ["causal", "block_causal"])
def test_compiled_steps_give_the_losses_of_a_cpu(new_job: Callable[..., Job], mask: str, checkpointing: str) -> None:
    """The small recipe has more query heads than key-value heads."""
    common = {
        "parallel__data_parallel_size": "1",
        "train__max_steps": "10",
        "train__attention_mask": mask,
        "train__activation_checkpointing": checkpointing,
    }
    on_cpu, on_cuda = new_job("cpu", **common), new_job("cuda", **{**common, **ON_CUDA, "compile__enabled": "true"})

    train_with_workers(on_cpu)
    train_with_workers(on_cuda)

    assert read_numbers(on_cuda)["loss"] == pytest.approx(read_numbers(on_cpu)["loss"], rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two workers on one GPU, and there is one here")
@pytest.mark.parametrize(
    ("sizes", "tolerance"),
    [
        ({"parallel__data_parallel_size": "2"}, 0.0),
        ({"parallel__data_parallel_size": "2", "parallel__zero_stage": "1"}, 0.0),
        ({"parallel__data_parallel_size": "2", "parallel__zero_stage": "2"}, 0.0),
        ({"parallel__data_parallel_size": "2", "parallel__zero_stage": "3"}, 0.0),
        ({"parallel__data_parallel_size": "1", "parallel__tensor_parallel_size": "2"}, 1e-4),
    ],
    ids=["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel"],
)
def test_two_gpus_give_the_losses_of_one(new_job: Callable[..., Job], sizes: dict[str, str], tolerance: float) -> None:
    kv = {"model__num_key_value_heads": "2", "train__max_steps": "10"}
    by_layer = {name: stage for name, stage in sizes.items() if stage == "3"}  # with graphs of its own
    alone, shared = new_job("alone", **ON_CUDA, **kv, **by_layer), new_job("shared", **{**ON_CUDA, **kv, **sizes})

    train_with_workers(alone)
    train_with_workers(shared)

    assert read_numbers(shared)["loss"] == pytest.approx(read_numbers(alone)["loss"], rel=tolerance, abs=0.0)
