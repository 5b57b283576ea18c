"""`plan` estimates a run's memory, time and cost and what failures cost it, and refuses what its nodes cannot hold."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from services.common.hardware.instance_types import default_lustre_size, read_instance_types
from services.common.process.entry_point import exit_code_of
from services.common.program.backends.neuron_xla import MAX_COLLECTIVE_BYTES
from services.common.recipe.derived import GPU_MFU, NEURON_MFU_OF_PRESETS, causal_flops_per_token, estimate_step
from services.common.recipe.file import load_recipe
from services.common.recipe.memory_estimate import (
    FLOAT32_BYTES,
    checkpoint_bytes,
    gradient_bytes_sent,
    memory_of_worker,
    weight_bytes_sent,
)
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import load_with, write_recipe
from services.trainer.__main__ import main
from services.trainer.inspection.goodput import (
    FAILURE_SHARES,
    RESTART_SECONDS,
    Failure,
    RunTimes,
    failure_costs,
    mean_cost_seconds,
    optimal_interval_steps,
)
from services.trainer.tests.step_trace import trace_step

RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.toml"))
LARGE = [path for path in RECIPES if not path.stem.startswith("tiny-")]
LLAMA_2_7B, LLAMA_3_8B, LLAMA_ON_TRN2, TINY_CPU, TINY_CUDA = (
    next(path for path in RECIPES if path.stem == name)
    for name in ("llama2-7b-trn1", "llama3-8b-trn1", "llama3.1-8b-trn2", "tiny-cpu", "tiny-cuda")
)
ON_A_GPU = (
    *("--model.hidden_size=2048", "--model.intermediate_size=5632", "--model.num_hidden_layers=22"),
    *("--model.num_attention_heads=32", "--model.num_key_value_heads=4", "--parallel.device=cuda"),
    *("--parallel.tensor_parallel_size=1", "--parallel.data_parallel_size=1", "--cluster.trainer_workers_per_node=1"),
    *("--train.activation_checkpointing=none", "--batch.micro_batch_size=4", "--batch.global_batch_size=64"),
)
"""Options that make a model of a billion parameters on one GPU of LLAMA_2_7B."""

ON_TWO_NODES = ("--parallel.data_parallel_size=8", "--checkpoint.memory_interval_steps=5")


def plan(path: Path, *options: str) -> int:
    return exit_code_of(lambda: main(["plan", "--recipe", str(path), "--root", "/nonexistent", *options]))


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_its_nodes_and_a_failure_loses_less_than_an_hour(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(path) == 0

    shown, recipe = capsys.readouterr().out, load_recipe(path)
    # 13B and 70B are too large for the default file system, which their recipes say, too.
    is_large = path.stem in ("llama2-13b-trn1", "llama3-70b-trn2")
    assert re.findall("warning, [a-z]+", shown) == (["warning, grace"] if is_large else [])
    lost = re.search(r"loss .* ([\d,]+) min, \$[\d,]+: ([\d,]+) steps", shown)
    assert lost, shown
    assert int(lost[1].replace(",", "")) < 60
    assert int(lost[2].replace(",", "")) == recipe.checkpoint.interval_steps
    assert "70b" in path.stem or 3 * checkpoint_bytes(recipe) < 0.8 * default_lustre_size().gib * 2**30


@pytest.mark.parametrize(
    ("path", "options", "shown"),
    [
        (LLAMA_2_7B, (), r"write +69\.0 s .* at 1\.17 GB/s"),
        (LLAMA_2_7B, ("--storage-gb-per-second=0.293",), r"write +276\.0 s .* at 0\.293 GB/s"),
        (LLAMA_2_7B, ("--storage-gb-per-second=0.293",), r"warning, grace period .* DRAIN=828"),
        (LLAMA_2_7B, ("--storage-gb-per-second=0.293", "--checkpoint.interval_steps=5"), "warning, interval"),
        (LLAMA_2_7B, ("--checkpoint.memory_interval_steps=5",), r"copies .* take 75\.31 GiB of its /dev/shm"),
        (LLAMA_2_7B, ON_TWO_NODES, r"copies .* take 150\.62 GiB .*\n +warning, copies in memory .* has 96\.00 GiB"),
        (TINY_CPU, (), r"not compared(.|\n)*step +unknown"),  # without an instance type
        (TINY_CUDA, (), r"graphs to compile +4 \((.|\n)*not compared"),  # the update is no graph
        (LLAMA_2_7B, ("--cluster.trainer_workers_per_node=4",), "28 of the 32 NeuronCores"),
        # A trn2 has two physical cores a worker, or one with half the memory.
        (LLAMA_ON_TRN2, ("--cluster.trainer_workers_per_node=64",), "24.00 GiB of a worker of trn2.48xlarge"),
        (LLAMA_ON_TRN2, (), "21% of the peak of 10,672 TFLOP/s a node, 167 a worker"),
        (LLAMA_ON_TRN2, ("--cluster.trainer_instance_type=trn2u.48xlarge",), r"cost +unknown: "),
        (LLAMA_ON_TRN2, ("--dollars-per-node-hour=40",), r"cost +\$[\d,]+ at \$40\.00"),
        (LLAMA_2_7B, ("--model.preset=tinyllama-1.1b", "--parallel.tensor_parallel_size=4"), "29% of .*Llama 2 13B"),
        (
            LLAMA_2_7B,
            (*ON_A_GPU, "--cluster.trainer_instance_type=p5.4xlarge"),
            rf"{GPU_MFU:.0%} of the peak of 989 TFLOP/s a node, .*(.|\n)*\$6\.88",
        ),
        (LLAMA_2_7B, (*ON_A_GPU, "--cluster.trainer_instance_type=p5.48xlarge"), "7 of the 8 GPUs of a node"),
    ],
)
def test_a_plan_shows(path: Path, options: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(path, *options) == 0
    printed = capsys.readouterr().out
    assert re.search(shown, printed), printed


@pytest.mark.parametrize(
    ("path", "options", "place"),
    [
        (LLAMA_2_7B, "--cluster.trainer_workers_per_node=64", "32 NeuronCores"),
        (LLAMA_2_7B, "--corpus.sequence_length=1048576", "tensor parallelism"),
        (LLAMA_2_7B, "--cluster.trainer_instance_type=trn9", "trn1.32xlarge"),
        (LLAMA_2_7B, "--parallel.device=cuda", "GPUs"),
        (LLAMA_2_7B, "--cluster.trainer_instance_type=p5.48xlarge", "NeuronCores"),
        (LLAMA_2_7B, "--mfu=0", "--mfu"),
        (LLAMA_2_7B, "--mfu=1.2", "--mfu"),
        (LLAMA_2_7B, "--node-mtbf-hours=nan", "--node-mtbf-hours"),
        (LLAMA_2_7B, "--nodes=0", "--nodes"),
        (LLAMA_ON_TRN2, "--cluster.trainer_workers_per_node=128", "12 GiB"),
        (LLAMA_ON_TRN2, "--cluster.trainer_workers_per_node=256", "128 NeuronCores"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    path: Path, options: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(path, options) == 2
    assert place in capsys.readouterr().err


@pytest.mark.parametrize(
    "too_much",
    [
        ("--batch.micro_batch_size=2", "--parallel.zero_stage=0"),
        (*ON_A_GPU, "--cluster.trainer_instance_type=p4d.24xlarge"),
    ],
)
def test_a_run_that_does_not_fit_ends_with_2_and_with_a_change_that_makes_it_fit(
    too_much: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(LLAMA_2_7B, *too_much) == 2
    found = re.search(r"Change next: (.*) \(then", capsys.readouterr().err)
    assert found
    assert plan(LLAMA_2_7B, *too_much, *found[1].split()) == 0


@pytest.mark.parametrize(
    ("path", "preset", "sequences_per_second", "nodes"),
    [
        (LLAMA_2_7B, "llama2-7b", 101.3, 16),
        (LLAMA_2_7B, "llama2-13b", 84.0, 32),
        (LLAMA_3_8B, "llama3.1-8b", 47.95, 32),
    ],
)
def test_the_utilization_is_that_of_the_published_run(
    path: Path, preset: str, sequences_per_second: float, nodes: int
) -> None:
    recipe = load_recipe(path, {"model.preset": preset})
    tokens_per_second = sequences_per_second * recipe.corpus.sequence_length
    peak = nodes * read_instance_types()["trn1.32xlarge"].peak_flops_per_second
    share, step = NEURON_MFU_OF_PRESETS[preset], estimate_step(recipe)

    assert causal_flops_per_token(recipe) * tokens_per_second / peak == pytest.approx(share, abs=0.005)
    assert step
    assert step.mfu == share


TIMES = RunTimes(step_seconds=40.0, write_seconds=69.0, node_wait_seconds=600.0)


def planned_goodput(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[float]:
    """Return the goodput in percent on the recipe's nodes, on 64 and on 1,024."""
    assert plan(LLAMA_2_7B, "--nodes=64", "--nodes=1024", *overrides) == 0
    return [float(each) for each in re.findall(r"goodput, [\d,]+ nodes? +([\d.]+)%", capsys.readouterr().out)]


def test_plan_prints_a_goodput_that_falls_with_nodes_and_without_a_watchdog(capsys: pytest.CaptureFixture[str]) -> None:
    few, more, many = planned_goodput(capsys)
    assert few > more > many > 90
    assert planned_goodput(capsys, "--train.watchdog_factor=0")[-1] < many  # hangs last until collectives time out


def test_a_lost_worker_costs_less_than_a_hung_one_and_a_lost_node() -> None:
    costs = failure_costs(load_recipe(LLAMA_2_7B), 4, TIMES)
    redone_seconds = 50 * 40.0 / 2 + 69.0

    worker, hang, node = costs[Failure.WORKER], costs[Failure.HANG], costs[Failure.NODE]
    assert worker.total_seconds == pytest.approx(RESTART_SECONDS + 69.0 + redone_seconds)
    assert hang.total_seconds - worker.total_seconds == pytest.approx(10 * 40.0)  # ten steps
    assert node.total_seconds - worker.total_seconds > 600
    assert sum(FAILURE_SHARES.values()) == pytest.approx(1)
    assert worker.total_seconds < mean_cost_seconds(costs) < node.total_seconds
    every_node_reads = failure_costs(load_recipe(LLAMA_2_7B, {"parallel.zero_stage": 0}), 1_024, TIMES)
    assert every_node_reads[Failure.WORKER].read_seconds == 16 * 69.0  # a model of its own for each replica


def test_youngs_optimum_loses_least_time_to_checkpoints_and_failures() -> None:
    cost_seconds, mtbf_hours = 60.0, 24.0

    def lost_share(steps: int) -> float:  # first order: a checkpoint an interval, half an interval a failure
        return cost_seconds / steps + steps / (2 * 3600 * mtbf_hours)

    best = optimal_interval_steps(cost_seconds, 1.0, 1, mtbf_hours)
    assert lost_share(best) < min(lost_share(best - 30), lost_share(best + 30))
    assert best == round(math.sqrt(2 * cost_seconds * 3600 * mtbf_hours))
    assert optimal_interval_steps(cost_seconds, 1e9, 1, mtbf_hours) == 1


IN_BFLOAT16 = {"train__dtype": "bfloat16", "train__param_dtype": "bfloat16", "train__reduction": "fast"}
ONE_GPU = {"parallel__device": "cuda", "parallel__data_parallel_size": "1"}
SPLIT = {"parallel__tensor_parallel_size": "4"}
ROUNDED = {"train__dtype": "bfloat16"}
QWEN_3 = {"model__qk_norm": "true", "model__head_dim": "128", "model__tie_word_embeddings": "true"}


LARGE_VOCABULARY = {"model__vocab_size": "8192", "compile__enabled": "false", "batch__loss_chunk_tokens": "512"}


def wide(folder: Path, **overrides: str) -> Recipe:
    """4 layers of Llama 3's shape, an eighth as wide: wide enough that layers are larger than norms and tables."""
    path = write_recipe(folder, tokenizer__train=None, tokenizer__model="nowhere")
    shape = {"model__num_hidden_layers": "4", "model__num_attention_heads": "8", "model__num_key_value_heads": "2"}
    shape |= {"model__hidden_size": "512", "model__intermediate_size": "1792", "model__vocab_size": "512"}
    shape |= {"parallel__data_parallel_size": "4", "batch__micro_batch_size": "1", "batch__global_batch_size": "16"}
    shape |= {"corpus__sequence_length": "512"}
    return load_with(path, **(shape | overrides))


@pytest.mark.parametrize(
    ("checkpointing", "overrides"),
    [
        ("none", {}),
        ("full", {**SPLIT, **IN_BFLOAT16, "parallel__zero_stage": "1"}),
        ("none", {"parallel__zero_stage": "2", "batch__global_batch_size": "64"}),
        ("none", {"parallel__zero_stage": "3", "batch__global_batch_size": "64"}),
        ("full", {"parallel__zero_stage": "3", "batch__global_batch_size": "64"}),
        ("full", {"parallel__zero_stage": "3", **IN_BFLOAT16, **LARGE_VOCABULARY}),
        pytest.param("none", QWEN_3, marks=pytest.mark.slow),
        ("full", {**QWEN_3, **SPLIT, **IN_BFLOAT16, "parallel__zero_stage": "1"}),
        pytest.param("selective", {**QWEN_3, **SPLIT, **IN_BFLOAT16}, marks=pytest.mark.slow),
        pytest.param("selective", SPLIT, marks=pytest.mark.slow),
        pytest.param("none", {**IN_BFLOAT16, **ONE_GPU}, marks=pytest.mark.slow),
        pytest.param(
            "selective", {**SPLIT, **IN_BFLOAT16, "parallel__reduce_dtype": "float32"}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "none",
        "full",
        "ZeRO-2",
        "ZeRO-3",
        "ZeRO-3, full",
        "ZeRO-3, vocabulary",
        "Qwen3, none",
        "Qwen3, full",
        "Qwen3, selective",
        "selective",
        "one GPU",
        "float32 sums",
    ],
)
def test_the_estimate_of_memory_is_near_what_a_step_of_the_program_holds(
    tmp_path: Path, checkpointing: str, overrides: dict[str, str]
) -> None:
    recipe = wide(tmp_path, train__activation_checkpointing=checkpointing, **overrides)

    assert memory_of_worker(recipe).peak_bytes == pytest.approx(trace_step(recipe).peak_bytes, rel=0.1)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path != LLAMA_2_7B))
        for path in LARGE
        if path.stem.endswith("-trn1")
    ],
)
def test_no_collective_of_a_shipped_recipe_on_xla_is_above_the_limit(path: Path) -> None:
    """Trace one layer with the tables, because the other layers are equal."""
    largest_bytes = trace_step(load_with(path, model__num_hidden_layers="1")).largest_bytes

    assert MAX_COLLECTIVE_BYTES / 2 < max(largest_bytes.values()) <= MAX_COLLECTIVE_BYTES


def test_tables_and_activations_above_the_limit_are_sent_in_pieces() -> None:
    """A worker of 8 has 525 MB of float32 of a table as wide as Llama 3 70B's; 2 long sequences are 537 MB."""
    changed = {"model__hidden_size": "8192", "parallel__tensor_parallel_size": "8", "batch__micro_batch_size": "2"}
    largest_bytes = trace_step(load_with(LLAMA_3_8B, model__num_hidden_layers="1", **changed)).largest_bytes

    assert 0 < largest_bytes["data"] <= MAX_COLLECTIVE_BYTES
    assert 0 < largest_bytes["tensor"] <= MAX_COLLECTIVE_BYTES


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("0", {}),
        ("1", ROUNDED),
        ("1", IN_BFLOAT16),
        ("2", {**ROUNDED, **QWEN_3}),
        ("3", ROUNDED),
        ("3", {**ROUNDED, **QWEN_3}),
    ],
)
def test_a_traced_step_sends_the_bytes_of_weights_in_the_plan(
    tmp_path: Path, stage: str, overrides: dict[str, str]
) -> None:
    """Weights of products are sent in bfloat16, and an embedding, also one that is the head, too, in float32."""
    recipe = wide(
        tmp_path, **{**LARGE_VOCABULARY, **overrides, "model__num_hidden_layers": "2", "parallel__zero_stage": stage}
    )
    weights = trace_step(recipe).sent_bytes["data"] - gradient_bytes_sent(recipe)
    assert weights == pytest.approx(weight_bytes_sent(recipe), rel=1e-3, abs=100)


@pytest.mark.parametrize(("stage", "times", "gathers"), [("1", 1, 1), ("2", 4, 1), ("3", 4, 2 * 4)])
def test_a_traced_step_sends_the_bytes_of_a_ring(tmp_path: Path, stage: str, times: int, gathers: int) -> None:
    recipe = wide(tmp_path, model__num_hidden_layers="2", parallel__zero_stage=stage, **SPLIT)
    trace = trace_step(recipe)

    # Key-value heads: 2, each held by 2 of the 4 workers.
    copies = (4 - 1) * 5 * 512 + (2 - 1) * 2 * 2 * 512 * 128
    assert 4 * trace.parameters == recipe.model.num_parameters + copies
    # Each worker passes 3/4 of the gradients on, from ZeRO-2 on those of each micro-batch, and 3/4 of the weights, with
    # ZeRO-3 for each of two passes, the two tables for one; norms, losses and one number more are small.
    gradients = FLOAT32_BYTES * trace.parameters
    assert gradient_bytes_sent(recipe) == pytest.approx(times * gradients * 3 / 4, rel=0.01)
    tables = 2 * FLOAT32_BYTES * 512 * 512 // 4
    weights = gathers * gradients - (times * tables if stage == "3" else 0)
    assert weight_bytes_sent(recipe) == pytest.approx(weights * 3 / 4, rel=0.01)
    assert trace.sent_bytes["data"] == pytest.approx((times * gradients + weights) * 3 / 4, rel=0.01)
    # In each micro-batch each of 2 layers gathers and scatters [1, 512, 512] twice, forward and backward; the embedding
    # scatters and the loss gathers. Beside them the loss exchanges a few numbers for each token.
    activation = FLOAT32_BYTES * 512 * 512 * 3 / 4
    assert trace.sent_bytes["tensor"] == pytest.approx(4 * (2 * 8 + 4) * activation, rel=0.02)
    assert not torch.distributed.is_initialized()
