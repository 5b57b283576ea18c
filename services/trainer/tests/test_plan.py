"""`plan` estimates what a run needs, and refuses one that its nodes cannot hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.hardware.instance_types import default_lustre_size, read_instance_types
from services.common.process.entry_point import exit_code_of
from services.common.recipe.derived import causal_flops_per_token
from services.common.recipe.file import load_recipe
from services.common.recipe.memory_estimate import checkpoint_bytes
from services.trainer.__main__ import main
from services.trainer.inspection.run_plan import GPU_MFU, NEURON_MFU_OF_PRESETS, Assumptions, estimate_step

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


def plan(path: Path, *options: str) -> int:
    return exit_code_of(lambda: main(["plan", "--recipe", str(path), "--root", "/nonexistent", *options]))


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_its_nodes_and_a_failure_loses_less_than_an_hour(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(path) == 0

    shown, recipe = capsys.readouterr().out, load_recipe(path)
    # 13B is too large for the default file system, which its recipe says, too.
    assert re.findall("warning, [a-z]+", shown) == (["warning, notice"] if path.stem == "llama2-13b-trn1" else [])
    lost = re.search(r"loss .* ([\d,]+) min, \$[\d,]+: ([\d,]+) steps", shown)
    assert lost, shown
    assert int(lost[1].replace(",", "")) < 60
    assert int(lost[2].replace(",", "")) == recipe.checkpoint.interval_steps
    assert 3 * checkpoint_bytes(recipe) < 0.8 * default_lustre_size().gib * 2**30


@pytest.mark.parametrize(
    ("path", "options", "shown"),
    [
        (LLAMA_2_7B, (), r"write +69\.0 s .* at 1\.17 GB/s"),
        (LLAMA_2_7B, ("--storage-gb-per-second=0.293",), r"write +276\.0 s .* at 0\.293 GB/s"),
        (LLAMA_2_7B, ("--storage-gb-per-second=0.293",), r"warning, notice .* DRAIN=828"),
        (LLAMA_2_7B, ("--storage-gb-per-second=0.293", "--checkpoint.interval_steps=5"), "warning, interval"),
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
    share, step = NEURON_MFU_OF_PRESETS[preset], estimate_step(recipe, Assumptions())

    assert causal_flops_per_token(recipe) * tokens_per_second / peak == pytest.approx(share, abs=0.005)
    assert step
    assert step.mfu == share
