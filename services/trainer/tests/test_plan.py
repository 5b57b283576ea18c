"""`plan` says what a run will need, and whether its nodes have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from services.common.hardware.instance_types import read_instance_types
from services.common.hardware.lustre import default_lustre_size
from services.common.process.entry_point import exit_code_of
from services.common.program.backends.neuron_xla import MAX_COLLECTIVE_BYTES
from services.common.recipe.derived import causal_flops_per_token
from services.common.recipe.file import load_recipe
from services.common.recipe.memory_estimate import FLOAT32_BYTES, memory_of_worker
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import load_with, write_recipe
from services.trainer.__main__ import main
from services.trainer.checkpoints.interval import NODE_MTBF_HOURS, optimal_interval_seconds, optimal_interval_steps
from services.trainer.inspection.run_plan import GPU_MFU, NEURON_MFU_OF_PRESETS
from services.trainer.inspection.step_trace import trace_step

RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.toml"))
SMALLEST, LARGE = "tiny-cpu", [path for path in RECIPES if not path.stem.startswith("tiny-")]
TOO_LARGE_FOR_THE_DEFAULT_FILE_SYSTEM = "llama2-13b-trn1"  # and its recipe says so
LLAMA_2_7B = next(path for path in RECIPES if path.stem == "llama2-7b-trn1")
LLAMA_3_8B = next(path for path in RECIPES if path.stem == "llama3-8b-trn1")
LLAMA_ON_TRN2 = next(path for path in RECIPES if path.stem == "llama3.1-8b-trn2")


def plan(path: Path, *options: str) -> int:
    return exit_code_of(lambda: main(["plan", "--recipe", str(path), "--root", "/nonexistent", *options]))


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_the_nodes_that_it_names(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = plan(path, "--no-dry-run")

    shown = capsys.readouterr()
    assert exit_code == 0, shown.err
    warnings = re.findall("warning, [a-z]+", shown.out)
    assert warnings == (["warning, notice"] if path.stem == TOO_LARGE_FOR_THE_DEFAULT_FILE_SYSTEM else [])
    for title in ("recipe", "topology", "memory of a worker, GiB", "time and cost", "checkpoints, every"):
        assert f"\n{title}" in shown.out
    assert re.search(r"Young's optimum +every [\d,]+ steps .* the recipe says [\d,]+\.", shown.out)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_failure_of_a_shipped_recipe_loses_less_than_an_hour_and_its_checkpoints_fit_the_stacks_file_system(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(path, "--no-dry-run") == 0

    shown = capsys.readouterr().out
    lost = re.search(r"loss .* ([\d,]+) min, \$[\d,]+: ([\d,]+) steps", shown)
    taken = re.search(r"space +([\d.,]+) GiB for 3 checkpoints", shown)
    assert lost, shown
    assert taken, shown
    assert int(lost[1].replace(",", "")) < 60
    assert int(lost[2].replace(",", "")) == load_recipe(path).checkpoint.interval_steps
    assert float(taken[1].replace(",", "")) < 0.8 * default_lustre_size().gib


def test_a_checkpoint_is_written_as_fast_as_the_stacks_file_system_unless_another_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan(LLAMA_2_7B, "--no-dry-run") == 0
    by_default = capsys.readouterr().out
    assert re.search(r"write +69\.0 s .* at 1\.17 GB/s, as the stacks' FSx of 1,200 GiB at 1,000 MB/s/TiB", by_default)
    assert re.search(r"notice +3 checkpoints take 208 s, .* 300 s", by_default)

    assert plan(LLAMA_2_7B, "--no-dry-run", "--storage-gb-per-second=0.293", "--checkpoint.interval_steps=5") == 0
    slow = capsys.readouterr().out
    assert re.search(r"write +276\.0 s .* at 0\.293 GB/s \(--storage-gb-per-second\)", slow)
    assert re.search(r"warning, notice +3 checkpoints take 828 s, .* of 0\.9 GB/s .* DRAIN=828", slow)
    assert re.search(r"warning, interval +.* 199\.8 s", slow)


@pytest.mark.slow
@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_step_of_every_shipped_recipe_runs_on_its_whole_topology(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(path) == 0
    assert "\ndry run" in capsys.readouterr().out


def test_on_a_gpu_the_update_is_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in RECIPES if path.stem == "tiny-cuda")

    assert plan(path, "--no-dry-run") == 0
    assert re.search(r"graphs to compile +4 \(forward, backward, evaluate, activations\)", capsys.readouterr().out)


def test_the_small_recipe_is_planned_with_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in RECIPES if path.stem == SMALLEST)

    assert plan(path) == 0
    shown = capsys.readouterr().out
    assert "not compared: the recipe has no cluster.trainer_instance_type" in shown
    assert "1,901,696 on each worker" in shown


def test_a_run_that_does_not_fit_ends_with_2_and_with_a_change_that_makes_it_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    too_much = ("--no-dry-run", "--batch.micro_batch_size=2", "--parallel.zero_stage=0")

    assert plan(LLAMA_2_7B, *too_much) == 2
    said = capsys.readouterr().err
    assert "trn1.32xlarge has 16 GiB" in said
    found = re.search(r"Change next: (.*) \(then", said)
    assert found, said
    assert plan(LLAMA_2_7B, *too_much, *found[1].split()) == 0


def test_a_run_that_no_change_makes_fit_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(LLAMA_2_7B, "--no-dry-run", "--corpus.sequence_length=1048576") == 2
    assert "tensor parallelism" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workers", "exit_code", "said"),
    [
        (64, 0, "of the 24.00 GiB of a worker of trn2.48xlarge"),  # two physical cores each
        (128, 2, "trn2.48xlarge has 12 GiB"),  # one each, and half the memory
        (256, 2, "a trn2.48xlarge has 128 NeuronCores, one for each worker"),
    ],
)
def test_the_cores_of_a_trn2_are_as_small_as_its_workers_need(
    workers: int, exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(LLAMA_ON_TRN2, "--no-dry-run", f"--cluster.trainer_workers_per_node={workers}") == exit_code

    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def test_the_price_of_an_ultraserver_s_node_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    trn2u = "--cluster.trainer_instance_type=trn2u.48xlarge"
    assert plan(LLAMA_ON_TRN2, "--no-dry-run", trn2u) == 0
    shown = capsys.readouterr().out
    assert re.search(r"cost +unknown: .*trn2u\.48xlarge \(--dollars-per-node-hour\)", shown)
    assert re.search(r"loss .* loses at most \d+ min: 50 steps", shown)

    assert plan(LLAMA_ON_TRN2, "--no-dry-run", trn2u, "--dollars-per-node-hour=40") == 0
    assert re.search(r"cost +\$[\d,]+ at \$40\.00 for a node-hour", capsys.readouterr().out)


def test_models_that_span_nodes_and_idle_cores_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(LLAMA_2_7B, "--no-dry-run", "--cluster.trainer_workers_per_node=4") == 0

    shown = capsys.readouterr().out
    assert re.search(r"first model +rank 0-7 on node 0-1", shown)
    assert "warning, split" in shown
    assert "28 of the 32 NeuronCores of a node" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cluster.trainer_workers_per_node=64",), "a trn1.32xlarge has 32 NeuronCores"),
        (
            ("--cluster.trainer_instance_type=trn9",),
            "unknown instance type 'trn9'; known: trn1.32xlarge",
        ),
        (
            ("--parallel.device=cuda",),
            "'cuda' needs GPUs, and cluster.trainer_instance_type trn1.32xlarge has NeuronCores",
        ),
        (
            ("--cluster.trainer_instance_type=p5.48xlarge",),
            "'xla' needs NeuronCores, and cluster.trainer_instance_type p5.48xlarge has GPUs",
        ),
        (("--mfu=0",), "--mfu 0.0: expected a number above 0"),
        (("--mfu=1.2",), "--mfu 1.2: expected"),
        (("--node-mtbf-hours=nan",), "--node-mtbf-hours nan: expected a number above 0"),
        (("--dry-run",), "unrecognized argument '--dry-run'"),
    ],
)
def test_what_nothing_can_be_planned_by_ends_with_2(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(LLAMA_2_7B, "--no-dry-run", *options) == 2
    assert message in capsys.readouterr().err


def test_cost_follows_from_the_utilization_and_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    costs = []
    for options in ((), ("--mfu=0.74",), ("--mfu=0.74", "--dollars-per-node-hour=43")):
        assert plan(LLAMA_2_7B, "--no-dry-run", *options) == 0
        found = re.search(r"cost +\$([\d,]+) at", capsys.readouterr().out)
        assert found
        costs.append(int(found[1].replace(",", "")))

    assert costs[1] == pytest.approx(costs[0] / 2, rel=1e-3)
    assert costs[2] == pytest.approx(costs[0], rel=1e-3)


ONE_BILLION_ON_A_GPU = (
    *("--model.hidden_size=2048", "--model.intermediate_size=5632", "--model.num_hidden_layers=22"),
    *("--model.num_attention_heads=32", "--model.num_key_value_heads=4", "--parallel.device=cuda"),
    *("--parallel.tensor_parallel_size=1", "--parallel.data_parallel_size=1", "--cluster.trainer_workers_per_node=1"),
    *("--train.activation_checkpointing=none", "--batch.micro_batch_size=4", "--batch.global_batch_size=64"),
)


def test_a_billion_parameters_are_planned_on_one_gpu_by_its_memory_and_its_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_one = (*ONE_BILLION_ON_A_GPU, "--no-dry-run", "--cluster.trainer_instance_type=p5.4xlarge")

    assert plan(LLAMA_2_7B, *on_one) == 0
    shown = capsys.readouterr().out
    assert re.search(r"the peak is \d+% of the 80\.00 GiB of a worker of p5\.4xlarge", shown)
    assert f"at {GPU_MFU:.0%} of the peak of 989 TFLOP/s a node" in shown
    assert re.search(r"cost +\$[\d,]+ at \$6\.88 for a node-hour", shown)


def test_gpus_that_no_worker_has_are_idle_in_the_plan_and_workers_without_one_end_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_eight = (*ONE_BILLION_ON_A_GPU, "--no-dry-run", "--cluster.trainer_instance_type=p5.48xlarge")

    assert plan(LLAMA_2_7B, *on_eight) == 0
    shown = capsys.readouterr().out
    assert "7 of the 8 GPUs of a node" in shown
    assert "of the peak of 989 TFLOP/s a node" in shown  # without the idle ones

    many = ("--parallel.data_parallel_size=16", "--cluster.trainer_workers_per_node=16")
    assert plan(LLAMA_2_7B, *on_eight, *many) == 2
    assert "a p5.48xlarge has 8 GPUs, one for each worker" in capsys.readouterr().err


def test_a_run_that_a_gpu_cannot_hold_is_told_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    on_a_small_one = (*ONE_BILLION_ON_A_GPU, "--no-dry-run", "--cluster.trainer_instance_type=p4d.24xlarge")

    assert plan(LLAMA_2_7B, *on_a_small_one) == 2
    said = capsys.readouterr().err
    assert "p4d.24xlarge has 40 GiB" in said
    assert "Change next: --train.activation_checkpointing=full" in said


@pytest.mark.parametrize(
    ("path", "preset", "sequences_per_second", "nodes"),
    [
        (LLAMA_2_7B, "llama2-7b", 101.3, 16),
        (LLAMA_2_7B, "llama2-13b", 84.0, 32),
        (LLAMA_3_8B, "llama3.1-8b", 47.95, 32),
    ],
)
def test_the_utilization_is_that_of_the_published_run(
    path: Path, preset: str, sequences_per_second: float, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(path, {"model.preset": preset})
    tokens_per_second = sequences_per_second * recipe.corpus.sequence_length
    peak = nodes * read_instance_types()["trn1.32xlarge"].peak_flops_per_second
    share = NEURON_MFU_OF_PRESETS[preset]

    assert causal_flops_per_token(recipe) * tokens_per_second / peak == pytest.approx(share, abs=0.005)
    assert plan(path, "--no-dry-run", f"--model.preset={preset}") in (0, 2)
    assert f"at {share:.0%} of the peak" in capsys.readouterr().out


def test_a_model_without_a_published_run_and_trn2_have_a_share_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(LLAMA_2_7B, "--no-dry-run", "--model.preset=tinyllama-1.1b", "--parallel.tensor_parallel_size=4") == 0
    assert re.search(r"at 29% of the peak .*Llama 2 13B", capsys.readouterr().out)
    assert plan(LLAMA_ON_TRN2, "--no-dry-run") == 0
    # 16 chips of 667 TFLOP/s, each for 4 workers.
    assert "at 21% of the peak of 10,672 TFLOP/s a node, 167 a worker" in capsys.readouterr().out


def test_youngs_optimum_loses_least_time_to_checkpoints_and_failures() -> None:
    cost, mtbf = 60.0, 24 * 3600.0
    best = optimal_interval_seconds(cost, mtbf)

    def lost_share(interval: float) -> float:  # first order: a checkpoint an interval, half an interval a failure
        return cost / interval + interval / (2 * mtbf)

    assert lost_share(best) < min(lost_share(best * 0.99), lost_share(best * 1.01))
    assert optimal_interval_steps(cost, 10.0, 1, 24.0) == round(best / 10.0)
    assert optimal_interval_steps(cost, 1e9, 1, 24.0) == 1
    assert pytest.approx(6334.7, abs=0.1) == NODE_MTBF_HOURS


def wide(folder: Path, **overrides: str) -> Recipe:
    """4 layers of Llama 3's shape, an eighth as wide: wide enough that layers are larger than norms and tables."""
    path = write_recipe(folder, tokenizer__train=None, tokenizer__model="nowhere")
    shape = {
        "corpus__sequence_length": "512",
        "model__vocab_size": "512",
        "model__hidden_size": "512",
        "model__intermediate_size": "1792",
        "model__num_hidden_layers": "4",
        "model__num_attention_heads": "8",
        "model__num_key_value_heads": "2",
        "parallel__data_parallel_size": "4",
        "batch__micro_batch_size": "1",
        "batch__global_batch_size": "16",
    }
    return load_with(path, **(shape | overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {"train__activation_checkpointing": "none"},
        {
            "parallel__tensor_parallel_size": "4",
            "parallel__zero_stage": "1",
            "train__dtype": "bfloat16",
            "train__param_dtype": "bfloat16",
            "train__reduction": "fast",
            "train__activation_checkpointing": "full",
        },
        pytest.param(
            {"parallel__tensor_parallel_size": "4", "train__activation_checkpointing": "selective"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "parallel__device": "cuda",
                "parallel__data_parallel_size": "1",
                "train__dtype": "bfloat16",
                "train__param_dtype": "bfloat16",
                "train__reduction": "fast",
                "train__activation_checkpointing": "none",
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "parallel__tensor_parallel_size": "4",
                "parallel__reduce_dtype": "float32",
                "train__dtype": "bfloat16",
                "train__param_dtype": "bfloat16",
                "train__reduction": "fast",
                "train__activation_checkpointing": "selective",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["none", "full", "selective", "one GPU", "float32 sums"],
)
def test_the_estimate_of_memory_is_near_what_a_step_of_the_program_holds(
    tmp_path: Path, overrides: dict[str, str]
) -> None:
    recipe = wide(tmp_path, **overrides)

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
    traffic = trace_step(load_with(path, model__num_hidden_layers="1")).traffic

    for axis, of_axis in traffic.items():
        assert of_axis.largest_bytes <= MAX_COLLECTIVE_BYTES, axis
    assert max(of_axis.largest_bytes for of_axis in traffic.values()) > MAX_COLLECTIVE_BYTES / 2


def test_tables_and_activations_above_the_limit_are_sent_in_pieces() -> None:
    """A worker of 8 has 525 MB of float32 of a table as wide as Llama 3 70B's; 2 long sequences are 537 MB."""
    changed = {"model__hidden_size": "8192", "parallel__tensor_parallel_size": "8", "batch__micro_batch_size": "2"}
    traffic = trace_step(load_with(LLAMA_3_8B, model__num_hidden_layers="1", **changed)).traffic

    assert traffic["data"].largest_bytes <= MAX_COLLECTIVE_BYTES
    assert traffic["tensor"].largest_bytes <= MAX_COLLECTIVE_BYTES


@pytest.mark.slow
def test_a_plan_counts_the_bytes_of_sums_in_their_type(tmp_path: Path) -> None:
    """A layer passes activations 8 times between workers; 4 of these are sums, twice as large in float32."""
    in_bfloat16 = {"train__dtype": "bfloat16", "train__param_dtype": "bfloat16", "train__reduction": "fast"}
    sent = {
        dtype: trace_step(
            wide(tmp_path, parallel__tensor_parallel_size="4", parallel__reduce_dtype=dtype, **in_bfloat16)
        ).traffic["tensor"]
        for dtype in ("float32", "bfloat16")
    }
    activation = 2 * 512 * 512 * 3 / 4
    # In 4 micro-batches 4 layers sum 4 times; the loss sums the gradient of what it gathered.
    more = 4 * (4 * 4 + 1) * activation
    assert sent["float32"].sent_bytes - sent["bfloat16"].sent_bytes == more
    assert sent["float32"].calls == sent["bfloat16"].calls


def test_a_traced_step_sends_the_bytes_of_a_ring(tmp_path: Path) -> None:
    split = {"parallel__tensor_parallel_size": "4", "parallel__zero_stage": "1"}
    recipe = wide(tmp_path, model__num_hidden_layers="2", **split)
    trace = trace_step(recipe)

    # Key-value heads: 2, each held by 2 of the 4 workers.
    copies = (4 - 1) * 5 * 512 + (2 - 1) * 2 * 2 * 512 * 128
    assert 4 * trace.parameters == recipe.model.num_parameters + copies
    # Each worker passes 3/4 of the gradients on, and 3/4 of the weights; norms, losses and one number more are small.
    gradients = FLOAT32_BYTES * trace.parameters
    assert trace.traffic["data"].sent_bytes == pytest.approx(2 * gradients * 3 / 4, rel=0.01)
    # In each micro-batch each of 2 layers gathers and scatters [1, 512, 512] twice, forward and backward; the embedding
    # scatters and the loss gathers. Beside them the loss exchanges a few numbers for each token.
    activation = FLOAT32_BYTES * 512 * 512 * 3 / 4
    assert trace.traffic["tensor"].sent_bytes == pytest.approx(4 * (2 * 8 + 4) * activation, rel=0.02)
    assert not torch.distributed.is_initialized()
