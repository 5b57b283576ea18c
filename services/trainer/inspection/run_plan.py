"""Estimates a run's topology, memory, time, cost and checkpoints from its recipe, before the run holds anything.

The sources of the estimates are in docs/benchmarks/trainer.md.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from services.common.artifacts.corpus import CorpusPayload
from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB, MIB, InstanceType
from services.common.hardware.lustre import default_lustre_size
from services.common.process.termination_notice import (
    CHECKPOINTS_PER_NOTICE,
    TRAINER_NOTICE_SECONDS,
    needed_notice_seconds,
)
from services.common.program.backends.slow_paths import slow_paths
from services.common.program.mesh import make_mesh
from services.common.recipe.derived import causal_flops_per_token, derive, steps_of_run, tokens_per_step
from services.common.recipe.memory_estimate import checkpoint_bytes, memory_of_worker, micro_batches_per_model
from services.common.recipe.schema import Recipe, stage_nodes
from services.trainer.checkpoints.interval import (
    NODE_MTBF_HOURS,
    SECONDS_PER_HOUR,
    mtbf_seconds,
    optimal_interval_steps,
)
from services.trainer.checkpoints.retention import most_checkpoints
from services.trainer.inspection.failure_cost import (
    FAILURE_SHARES,
    NODE_WAIT_MINUTES,
    RunTimes,
    describe_cost,
    failure_costs,
    goodput,
    mean_cost_seconds,
)
from services.trainer.inspection.fit import instance_type
from services.trainer.inspection.step_trace import StepTrace

NEURON_MFU_OF_PRESETS = {"llama2-7b": 0.37, "llama2-13b": 0.29, "llama3-8b": 0.21, "llama3.1-8b": 0.21}
"""Share of its peak that a NeuronCore is assumed to reach, by preset: that of AWS Neuron's training benchmarks on
trn1.32xlarge, by `causal_flops_per_token`: Llama 2 7B with 101.3 sequences of 4,096 tokens a second on 16 nodes and
Llama 2 13B with 84.0 on 32 (SDK 2.20), and Llama 3.1 8B with 47.95 of 8,192 tokens on 32 (SDK 2.24). No training
benchmark is published for trn2, so a preset has the same share there.
"""
NEURON_MFU = 0.29
"""Share for a model without a published benchmark: that between the others."""
GPU_MFU = 0.42
"""Share of its dense bfloat16 peak that a GPU is assumed to reach, by `causal_flops_per_token`: that of a compiled
Llama of a billion parameters on one H100 (docs/benchmarks/trainer.md).
"""
CRAMPED = 0.9
"""Share of a device's memory above which a plan warns, because the runtime and the collectives need memory too."""


@dataclass(frozen=True)
class Assumptions:
    """Numbers that are not in the recipe, which a user can override."""

    mfu: float | None = None
    """Model FLOPs utilization: the share of the peak that the model's own operations reach, where attention counts its
    causal half. None stands for `assumed_mfu`.
    """
    storage_gb_per_second: float | None = None
    """Speed at which all workers together write a checkpoint, in 10^9 bytes a second. None stands for the speed of
    `default_lustre_size`.
    """
    node_mtbf_hours: float = NODE_MTBF_HOURS
    """Mean time between failures of one node, in hours."""
    dollars_per_node_hour: float | None = None
    """Price of a node in dollars an hour. None stands for the price of the instance type."""
    node_wait_minutes: float = NODE_WAIT_MINUTES
    """Minutes until another node has taken the place of a lost one."""
    nodes: tuple[int, ...] = ()
    """Numbers of nodes whose goodput is estimated beside that of the recipe's nodes."""


def add_assumptions(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--mfu",
        type=float,
        help=f"share of the peak FLOP/s that a step reaches (default: {GPU_MFU} of GPUs; of NeuronCores what AWS "
        f"published for the preset, else {NEURON_MFU})",
    )
    parser.add_argument(
        "--storage-gb-per-second",
        type=float,
        help=f"speed of writing checkpoints (default: {default_lustre_size().bytes_per_second / 1e9:.3g}, the speed of "
        f"the stacks' file system)",
    )
    parser.add_argument(
        "--node-mtbf-hours",
        type=float,
        default=NODE_MTBF_HOURS,
        help=f"mean time between failures of a node (default: {NODE_MTBF_HOURS:,.0f})",
    )
    parser.add_argument(
        "--dollars-per-node-hour", type=float, help="price of a node (default: on demand, by instance type)"
    )
    parser.add_argument(
        "--node-wait-minutes",
        type=float,
        default=NODE_WAIT_MINUTES,
        help=f"minutes until another node replaces a lost one (default: {NODE_WAIT_MINUTES:g})",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[],
        help="numbers of nodes whose goodput is estimated too, where each node has as much to do as in the recipe",
    )


def read_assumptions(arguments: Namespace) -> Assumptions:
    """Read the assumptions from the command line. Raises `RecipeError` for a number out of range."""
    for name in ("mfu", "storage_gb_per_second", "node_mtbf_hours", "dollars_per_node_hour", "node_wait_minutes"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise RecipeError(f"--{name.replace('_', '-')} {value}: expected a number above 0.")
    for number in arguments.nodes:
        if number < 1:
            raise RecipeError(f"--nodes {number}: expected numbers of nodes, each at least 1.")
    if arguments.mfu is not None and arguments.mfu > 1:
        raise RecipeError(f"--mfu {arguments.mfu}: expected a share of the peak, at most 1.")
    return Assumptions(
        mfu=arguments.mfu,
        storage_gb_per_second=arguments.storage_gb_per_second,
        node_mtbf_hours=arguments.node_mtbf_hours,
        dollars_per_node_hour=arguments.dollars_per_node_hour,
        node_wait_minutes=arguments.node_wait_minutes,
        nodes=tuple(arguments.nodes),
    )


def describe_plan(recipe: Recipe, corpus: CorpusPayload | None, assumptions: Assumptions) -> str:
    """Return the plan as a page of text. The numbers of the data need the corpus."""
    device = instance_type(recipe)
    slow = {f"warning, {part}": reason for part, reason in slow_paths(recipe).items()}
    sections = [
        f"{recipe.name}: estimates of the run's needs (docs/benchmarks/trainer.md has their sources)",
        _table("recipe", derive(recipe, corpus) | slow),
        _table("topology", _topology(recipe, device)),
        _memory_table(recipe, device),
        _table("time and cost", _time_and_cost(recipe, device, assumptions)),
        _table(
            f"checkpoints, every {recipe.checkpoint.interval_steps:,} steps", _checkpoints(recipe, device, assumptions)
        ),
        _table(
            f"failures, one in {assumptions.node_mtbf_hours:,.0f} hours of a node (--node-mtbf-hours)",
            _failures(recipe, device, assumptions),
        ),
    ]
    return "\n\n".join(sections)


def describe_trace(recipe: Recipe, trace: StepTrace) -> str:
    """Describe the traced step beside the estimate of its memory."""
    workers, parts = recipe.parallel.num_workers, recipe.parallel.tensor_parallel_size
    held, model = trace.parameters * parts, recipe.model.num_parameters
    rows = {
        "parameters": f"{trace.parameters:,} on each worker; {parts} together hold the model's {model:,} and "
        f"{held - model:,} copies or padding",
        "peak of memory": f"{_size(trace.peak_bytes)}, estimated above: {_size(memory_of_worker(recipe).peak_bytes)}",
    }
    for axis, traffic in trace.traffic.items():
        rows[f"along axis {axis}"] = (
            f"{traffic.calls:,} collectives, the largest of {_size(traffic.largest_bytes)}, "
            f"{_size(traffic.sent_bytes)} sent by each worker"
        )
    if parts > 1:
        rows["activations"] = f"summed in {recipe.parallel.reduce_dtype} by the workers that share a model"
    title = f"dry run: a step of rank 0 of {workers} on tensors without memory; rank {workers - 1} holds as much"
    return _table(title, rows)


def _topology(recipe: Recipe, device: InstanceType | None) -> dict[str, str]:
    parallel, mesh = recipe.parallel, make_mesh(recipe, rank=0, world_size=recipe.parallel.num_workers)
    on_node, parts = recipe.cluster.trainer_workers_per_node, parallel.tensor_parallel_size
    models = mesh.groups("tensor")
    rows = {
        "workers": f"{parallel.num_workers:,}: {parallel.data_parallel_size:,} data parallel x {parts} tensor parallel",
        "nodes": f"{stage_nodes(recipe, 'trainer'):,}{f' {device.name}' if device else ''} with {on_node} each",
        "first model": _place(models[0], on_node),
        "last model": _place(models[-1], on_node),
        "key-value heads": f"{recipe.model.num_key_value_heads}, each held by {mesh.key_value_copies} of a model",
        "micro-batches": f"{micro_batches_per_model(recipe):,} in a step of each worker, sequences in each: "
        f"{recipe.batch.micro_batch_size}",
        "ZeRO stage": f"{parallel.zero_stage}",
    }
    if device and on_node < device.workers:
        rows["warning, idle"] = f"{device.workers - on_node} of the {device.workers} {device.accelerators} of a node"
    if on_node % parts:
        rows["warning, split"] = (
            "the workers of a model span nodes, so that every layer waits for the network: make "
            "cluster.trainer_workers_per_node a multiple of parallel.tensor_parallel_size"
        )
    return rows


def _place(ranks: list[int], workers_on_node: int) -> str:
    nodes = [ranks[0] // workers_on_node, ranks[-1] // workers_on_node]
    return f"rank {_span([ranks[0], ranks[-1]])} on node {_span(nodes)}"


def _span(ends: list[int]) -> str:
    return "-".join(f"{end}" for end in dict.fromkeys(ends))


def _memory_table(recipe: Recipe, device: InstanceType | None) -> str:
    memory = memory_of_worker(recipe)
    unit, unit_bytes = ("GiB", GIB) if memory.peak_bytes >= GIB else ("MiB", MIB)
    width = max(len(part.name) for part in memory.parts)
    lines = [f"{f'memory of a worker, {unit}':<{width + 2}}  {'forward':>8} {'backward':>8} {'update':>8}"]
    for part in (*memory.parts, memory.together):
        columns = [f"{size / unit_bytes:>8.2f}" if size else " " * 7 + "-" for size in part.sizes]
        lines.append(f"  {part.name:<{width}}  {' '.join(columns)}")
    if device is None:
        elsewhere = "; `doctor` compares it with the GPUs of its node" if recipe.parallel.device == "cuda" else ""
        return "\n".join([*lines, f"  not compared: the recipe has no cluster.trainer_instance_type{elsewhere}"])
    share = memory.peak_bytes / device.worker_memory_bytes
    lines.append(f"  the peak is {share:.0%} of the {_size(device.worker_memory_bytes)} of a worker of {device.name}")
    if CRAMPED < share <= 1:
        lines.append("  warning: little memory is left for the runtime, the graphs and the buffers of collectives")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.2f} MiB"


def assumed_mfu(recipe: Recipe, device: InstanceType) -> tuple[float, str]:
    """Return the share of the peak that a step of the recipe is assumed to reach, and where that share comes from."""
    if device.accelerators == "GPUs":
        return GPU_MFU, "this trainer's goal for one GPU"
    preset = recipe.model.preset
    if preset in NEURON_MFU_OF_PRESETS:
        return NEURON_MFU_OF_PRESETS[preset], "AWS's benchmark of this size on trn1"
    return NEURON_MFU, "AWS's benchmark of Llama 2 13B on trn1; none is known for this size"


def _mfu(recipe: Recipe, device: InstanceType, assumptions: Assumptions) -> tuple[float, str]:
    return assumed_mfu(recipe, device) if assumptions.mfu is None else (assumptions.mfu, "--mfu")


def _step_seconds(recipe: Recipe, device: InstanceType, mfu: float) -> float:
    """Return the seconds of an optimizer step at the share `mfu` of all workers' peak, without idle cores."""
    peak = recipe.parallel.num_workers * device.worker_peak_flops_per_second
    return causal_flops_per_token(recipe) * tokens_per_step(recipe) / (peak * mfu)


def _time_and_cost(recipe: Recipe, device: InstanceType | None, assumptions: Assumptions) -> dict[str, str]:
    operations = causal_flops_per_token(recipe) * tokens_per_step(recipe)
    rows = {"operations": f"{operations:.2e} FLOP in a step"}
    if device is None:
        return rows | {"step": "unknown: the recipe has no cluster.trainer_instance_type"}
    mfu, source_of_mfu = _mfu(recipe, device, assumptions)
    seconds = _step_seconds(recipe, device, mfu)
    hours = seconds * steps_of_run(recipe) / SECONDS_PER_HOUR
    node_hours = hours * stage_nodes(recipe, "trainer")
    node_peak = recipe.cluster.trainer_workers_per_node * device.worker_peak_flops_per_second
    price, source = _price(device, assumptions)
    return rows | {
        "step": f"{seconds:,.1f} s, {tokens_per_step(recipe) / seconds:,.0f} tokens/s, at {mfu:.0%} of the "
        f"peak of {node_peak / 1e12:,.0f} TFLOP/s a node, {device.worker_peak_flops_per_second / 1e12:,.0f} a worker "
        f"({source_of_mfu})",
        "run": f"{hours:,.0f} hours, {node_hours:,.0f} node-hours",
        "cost": f"${node_hours * price:,.0f} at ${price:,.2f} for a node-hour ({source})"
        if price is not None
        else f"unknown: no public list has a price of {device.name} (--dollars-per-node-hour)",
    }


def _price(device: InstanceType, assumptions: Assumptions) -> tuple[float | None, str]:
    """Return the price of a node in dollars an hour, None if it is unknown, and its source."""
    if assumptions.dollars_per_node_hour is not None:
        return assumptions.dollars_per_node_hour, "--dollars-per-node-hour"
    return device.dollars_per_hour, f"on demand, {device.price_source}"


def _checkpoints(recipe: Recipe, device: InstanceType | None, assumptions: Assumptions) -> dict[str, str]:
    nodes, write_seconds = stage_nodes(recipe, "trainer"), _write_seconds(recipe, assumptions)
    rows = {
        "write": f"{write_seconds:,.1f} s in the background for {_size(checkpoint_bytes(recipe))} at "
        f"{_describe_storage(assumptions)}",
        "space": _describe_space(recipe),
        **_describe_notice(recipe, write_seconds),
    }
    if device is None:
        return rows
    mfu, _ = _mfu(recipe, device, assumptions)
    step, interval = _step_seconds(recipe, device, mfu), recipe.checkpoint.interval_steps
    optimum = optimal_interval_steps(write_seconds, step, nodes, assumptions.node_mtbf_hours)
    price, _ = _price(device, assumptions)
    # Until the next checkpoint is committed, a failure loses the steps since the one before.
    lost_hours = (interval * step + write_seconds) / SECONDS_PER_HOUR
    rows |= {
        "loss": f"a failure without notice loses at most {lost_hours * 60:,.0f} min"
        f"{'' if price is None else f', ${lost_hours * nodes * price:,.0f}'}: {interval:,} steps and the write of the "
        f"next checkpoint",
        "Young's optimum": f"every {optimum:,} steps ({optimum * step / 60:,.0f} min) if training stopped for the "
        f"whole write; the recipe says {interval:,}. Training stops only for a copy to the host, which a run's summary "
        f"measures, so shorter intervals cost less",
    }
    if write_seconds > interval * step:
        rows["warning, interval"] = (
            f"a checkpoint takes longer than the {interval * step:,.1f} s to the next one, which then waits: raise "
            f"checkpoint.interval_steps"
        )
    return rows


def run_times(recipe: Recipe, assumptions: Assumptions) -> RunTimes:
    """Return the times that decide the cost of a failure. Raises `RecipeError` without an instance type."""
    device = instance_type(recipe)
    if device is None:
        raise RecipeError(
            f"{recipe.name}: the time of a step is unknown without cluster.trainer_instance_type. Pass a recipe that "
            f"names one, such as recipes/llama2-7b-trn1.toml, or --cluster.trainer_instance_type."
        )
    return _run_times(recipe, device, assumptions)


def _run_times(recipe: Recipe, device: InstanceType, assumptions: Assumptions) -> RunTimes:
    mfu, _ = _mfu(recipe, device, assumptions)
    return RunTimes(
        step_seconds=_step_seconds(recipe, device, mfu),
        write_seconds=_write_seconds(recipe, assumptions),
        node_wait_seconds=60 * assumptions.node_wait_minutes,
    )


def _failures(recipe: Recipe, device: InstanceType | None, assumptions: Assumptions) -> dict[str, str]:
    if device is None:
        return {"cost": "unknown: the recipe has no cluster.trainer_instance_type"}
    own, times = stage_nodes(recipe, "trainer"), _run_times(recipe, device, assumptions)
    rows = {str(failure): describe_cost(cost) for failure, cost in failure_costs(recipe, own, times).items()}
    for nodes in dict.fromkeys((own, *assumptions.nodes)):
        costs, hours = failure_costs(recipe, nodes, times), mtbf_seconds(nodes, assumptions.node_mtbf_hours) / 3600
        share = goodput(costs, nodes, assumptions.node_mtbf_hours)
        rows[f"goodput, {nodes:,} node{'s' * (nodes != 1)}"] = (
            f"{share:.2%} of their time goes into steps that count, with a failure in {hours:,.1f} hours that costs "
            f"{mean_cost_seconds(costs) / 60:,.1f} min on average"
        )
    return rows | {"kinds of failures": f"{_describe_shares()}, as in the pre-training of Llama 3"}


def _describe_shares() -> str:
    return ", ".join(f"{share:.0%} {failure}s" for failure, share in FAILURE_SHARES.items())


def _write_seconds(recipe: Recipe, assumptions: Assumptions) -> float:
    given = assumptions.storage_gb_per_second
    return checkpoint_bytes(recipe) / (given * 1e9 if given else default_lustre_size().bytes_per_second)


def _describe_storage(assumptions: Assumptions) -> str:
    if assumptions.storage_gb_per_second:
        return f"{assumptions.storage_gb_per_second:g} GB/s (--storage-gb-per-second)"
    size = default_lustre_size()
    return (
        f"{size.bytes_per_second / 1e9:.3g} GB/s, as the stacks' FSx of {size} has by default (--storage-gb-per-second)"
    )


def _describe_space(recipe: Recipe) -> str:
    """Describe the largest space that checkpoints need: those that are kept, and one that is being written."""
    policy, size = recipe.checkpoint, checkpoint_bytes(recipe)
    every = policy.keep_interval_steps
    for_good = recipe.train.max_steps // every - recipe.train.first_step // every if every else 0
    kept = f", and {for_good:,} that are kept permanently" if for_good else ""
    count = most_checkpoints(recipe)
    return f"{_size((count + for_good) * size)} for {count} checkpoints{kept}"


def _describe_notice(recipe: Recipe, write_seconds: float) -> dict[str, str]:
    """Describe whether the termination notice is long enough for the checkpoints that it should hold."""
    needed = needed_notice_seconds(write_seconds)
    seconds = f"{CHECKPOINTS_PER_NOTICE} checkpoints take {needed:,} s"
    if needed <= TRAINER_NOTICE_SECONDS:
        return {"notice": f"{seconds}, and a stopped container has {TRAINER_NOTICE_SECONDS} s: no step is lost"}
    enough = math.ceil(CHECKPOINTS_PER_NOTICE * checkpoint_bytes(recipe) / TRAINER_NOTICE_SECONDS / 1e8) / 10
    return {
        "warning, notice": f"{seconds}, but a stopped container has {TRAINER_NOTICE_SECONDS} s and may lose the steps "
        f"since the last checkpoint: use a file system of {enough:g} GB/s (fsx in terraform.tfvars), or a longer "
        f"notice (on Kubernetes DRAIN={needed})"
    }


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(len(name) for name in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])
