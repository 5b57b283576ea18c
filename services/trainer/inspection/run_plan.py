"""Estimates a run's topology, memory, time, cost, checkpoints and goodput from its recipe, before the run starts.

The sources of the estimates are in docs/benchmarks/trainer.md.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt

from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB, MIB, InstanceType, default_lustre_size
from services.common.process.shutdown import CHECKPOINTS_PER_GRACE_PERIOD, TRAINER_GRACE_SECONDS, needed_grace_seconds
from services.common.program.backends.slow_paths import slow_paths
from services.common.recipe.derived import (
    GPU_MFU,
    NEURON_MFU,
    Corpora,
    StepEstimate,
    derive,
    estimate_step,
    instance_type,
    tokens_per_step,
)
from services.common.recipe.memory_estimate import (
    checkpoint_bytes,
    gradient_bytes_sent,
    memory_copy_bytes,
    memory_of_worker,
    show_size,
    sums_per_step,
    weight_bytes_sent,
)
from services.common.recipe.schema import Recipe, key_value_copies, stage_nodes
from services.trainer.checkpoints.retention import most_checkpoints
from services.trainer.inspection.goodput import (
    FAILURE_SHARES,
    NODE_MTBF_HOURS,
    NODE_WAIT_MINUTES,
    SECONDS_PER_HOUR,
    RunTimes,
    failure_costs,
    goodput,
    mean_cost_seconds,
    mtbf_seconds,
    optimal_interval_steps,
)

CRAMPED = 0.9
"""Share of a device's memory above which a plan warns, because the runtime and the collectives need memory too."""


class Assumptions(BaseModel, frozen=True, allow_inf_nan=False):
    """Numbers that are not in the recipe. Each is an option of the command, with its description as help."""

    mfu: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=f"share of the peak FLOP/s that the model's operations reach, where attention counts its causal "
        f"half (default: {GPU_MFU} of GPUs; of NeuronCores what AWS published for the preset, else {NEURON_MFU})",
    )
    storage_gb_per_second: PositiveFloat | None = Field(
        default=None, description="speed of writing checkpoints (default: that of the stacks' FSx)"
    )
    node_mtbf_hours: PositiveFloat = Field(
        default=NODE_MTBF_HOURS, description=f"mean time between failures of a node (default: {NODE_MTBF_HOURS:.0f})"
    )
    dollars_per_node_hour: PositiveFloat | None = Field(
        default=None, description="price of a node (default: on demand, by instance type)"
    )
    node_wait_minutes: PositiveFloat = Field(
        default=NODE_WAIT_MINUTES,
        description=f"minutes until another node replaces a lost one (default: {NODE_WAIT_MINUTES:g})",
    )
    nodes: tuple[PositiveInt, ...] = Field(
        default=(), description="numbers of nodes whose goodput is estimated too, each with as much to do"
    )

    def write_seconds(self, recipe: Recipe) -> float:
        """Return the seconds in which all workers write a checkpoint."""
        given = self.storage_gb_per_second
        return checkpoint_bytes(recipe) / (given * 1e9 if given else default_lustre_size().bytes_per_second)


def describe_plan(recipe: Recipe, corpora: Corpora | None, assumptions: Assumptions) -> str:
    """Return the plan as a page of text. The numbers of the data need the corpora."""
    device = instance_type(recipe)
    step = estimate_step(recipe, assumptions.mfu, assumptions.dollars_per_node_hour)
    slow = {f"warning, {part}": reason for part, reason in slow_paths(recipe).items()}
    every = f"checkpoints, every {recipe.checkpoint.interval_steps:,} steps"
    failures = f"failures, one in {assumptions.node_mtbf_hours:,.0f} hours of a node (--node-mtbf-hours)"
    sections = [
        f"{recipe.name}: estimates of the run's needs (docs/benchmarks/trainer.md has their sources)",
        _table("recipe", derive(recipe, corpora) | slow),
        _table("topology", _topology(recipe, device)),
        _memory_table(recipe, device),
        _table("time and cost", _time_and_cost(recipe, step)),
        _table(every, _checkpoints(recipe, step, assumptions)),
        _table(failures, _failures(recipe, step, assumptions)),
    ]
    return "\n\n".join(sections)


def run_times(recipe: Recipe, assumptions: Assumptions) -> RunTimes:
    """Return the times that decide the cost of a failure. Raises `RecipeError` without an instance type."""
    step = estimate_step(recipe, assumptions.mfu, assumptions.dollars_per_node_hour)
    if step is None:
        raise RecipeError(
            f"{recipe.name}: the time of a step is unknown without cluster.trainer_instance_type. Pass a recipe that "
            f"names one, such as recipes/llama2-7b-trn1.toml, or --cluster.trainer_instance_type=NAME."
        )
    return RunTimes(step.seconds, assumptions.write_seconds(recipe), 60 * assumptions.node_wait_minutes)


def _topology(recipe: Recipe, device: InstanceType | None) -> dict[str, str]:
    parallel, on_node = recipe.parallel, recipe.cluster.trainer_workers_per_node
    parts = parallel.tensor_parallel_size
    heads, copies = recipe.model.num_key_value_heads, key_value_copies(recipe)
    rows = {
        "workers": f"{parallel.num_workers:,}: {parallel.data_parallel_size:,} data parallel x {parts} tensor parallel",
        "nodes": f"{stage_nodes(recipe, 'trainer'):,}{f' {device.name}' if device else ''} with {on_node} each",
        "key-value heads": f"{heads}, each held by {copies} of a model's workers",
    }
    if device and on_node < device.workers:
        rows["warning, idle"] = f"{device.workers - on_node} of the {device.workers} {device.accelerators} of a node"
    if on_node % parts:
        rows["warning, split"] = (
            "the workers of a model span nodes, so that every layer waits for the network: make "
            "cluster.trainer_workers_per_node a multiple of parallel.tensor_parallel_size"
        )
    return rows


def _memory_table(recipe: Recipe, device: InstanceType | None) -> str:
    memory = memory_of_worker(recipe)
    unit, unit_bytes = ("GiB", GIB) if memory.peak_bytes >= GIB else ("MiB", MIB)
    width = max(len(part.name) for part in memory.parts)
    lines = [f"{f'memory of a worker, {unit}':<{width + 2}}  {'forward':>8} {'backward':>8} {'update':>8}"]
    for part in (*memory.parts, memory.together):
        columns = [f"{size / unit_bytes:>8.2f}" if size else f"{'-':>8}" for size in part.sizes]
        lines.append(f"  {part.name:<{width}}  {' '.join(columns)}")
    if device is None:
        elsewhere = "; `doctor` compares it with the GPUs of its node" if recipe.parallel.device == "cuda" else ""
        return "\n".join([*lines, f"  not compared: the recipe has no cluster.trainer_instance_type{elsewhere}"])
    share = memory.peak_bytes / device.worker_memory_bytes
    lines.append(
        f"  the peak is {share:.0%} of the {show_size(device.worker_memory_bytes)} of a worker of {device.name}"
    )
    if CRAMPED < share <= 1:
        lines.append("  warning: little memory is left for the runtime, the graphs and the buffers of collectives")
    return "\n".join(lines)


def _time_and_cost(recipe: Recipe, step: StepEstimate | None) -> dict[str, str]:
    if step is None:
        return {"step": "unknown: the recipe has no cluster.trainer_instance_type"}
    of_worker = step.device.worker_peak_flops_per_second / 1e12
    of_node = recipe.cluster.trainer_workers_per_node * of_worker
    return {
        "step": f"{step.seconds:,.1f} s, {tokens_per_step(recipe) / step.seconds:,.0f} tokens/s, at {step.mfu:.0%} of "
        f"the peak of {of_node:,.0f} TFLOP/s a node, {of_worker:,.0f} a worker ({step.mfu_source})",
        "run": step.describe_hours(),
        "cost": step.describe_cost(),
        **_sums(recipe, step),
    }


def _sums(recipe: Recipe, step: StepEstimate) -> dict[str, str]:
    """Say what the sums of gradients over the nodes take. Measured shares of the peak include one sum a step.

    Rings over the data axis leave a node once for each worker of a model on it. Exact sums are no rings: each worker
    sends to all.
    """
    gradients, weights, nodes = gradient_bytes_sent(recipe), weight_bytes_sent(recipe), stage_nodes(recipe, "trainer")
    if nodes == 1 or not gradients:
        return {}
    parallel, on_node = recipe.parallel, recipe.cluster.trainer_workers_per_node
    rate = step.device.network_bytes_per_second
    is_ring = recipe.train.reduction == "fast" or parallel.device == "neuron"
    rings = min(parallel.tensor_parallel_size, on_node)
    seconds = (gradients * (rings if is_ring else on_node) + weights * rings) / rate
    times = sums_per_step(recipe)
    beyond = "; hours and cost above include one of the sums alone" if times > 1 else ""
    gathered = f", and {show_size(weights)} of weights" if weights else ""
    return {
        "sums": f"a worker sends {show_size(gradients)} of gradients, in {times} sum{'s' * (times > 1)} a step"
        f"{gathered}: "
        f"{seconds:,.1f} s, {seconds / step.seconds:.0%} of a step, at {rate / 1e9:,.0f} GB/s of a node, where "
        f"computing hides none{beyond}"
    }


def _checkpoints(recipe: Recipe, step: StepEstimate | None, assumptions: Assumptions) -> dict[str, str]:
    policy, size, every = recipe.checkpoint, checkpoint_bytes(recipe), recipe.checkpoint.keep_interval_steps
    count, write_seconds = most_checkpoints(recipe), assumptions.write_seconds(recipe)
    for_good = recipe.train.max_steps // every - recipe.train.first_step // every if every else 0
    kept = f", and {for_good:,} that are kept permanently" if for_good else ""
    given, fsx = assumptions.storage_gb_per_second, default_lustre_size()
    speed = f"{given:g} GB/s" if given else f"{fsx.bytes_per_second / 1e9:.3g} GB/s, as the stacks' FSx of {fsx} has"
    needed = needed_grace_seconds(write_seconds)
    grace = f"{CHECKPOINTS_PER_GRACE_PERIOD} checkpoints take {needed:,} s, and a stopped container has "
    rows = {
        "write": f"{write_seconds:,.1f} s in the background for {show_size(size)} at {speed} (--storage-gb-per-second)",
        "space": f"{show_size((count + for_good) * size)} for {count} checkpoints{kept}",
    }
    if needed <= TRAINER_GRACE_SECONDS:
        rows["grace period"] = f"{grace}{TRAINER_GRACE_SECONDS} s: no step is lost"
    else:
        enough = math.ceil(CHECKPOINTS_PER_GRACE_PERIOD * size / TRAINER_GRACE_SECONDS / 1e8) / 10
        rows["warning, grace period"] = (
            f"{grace}only {TRAINER_GRACE_SECONDS} s, so a stop may lose the steps since the last checkpoint: use a "
            f"file system of {enough:g} GB/s (fsx in terraform.tfvars), or on Kubernetes DRAIN={needed}"
        )
    nodes = stage_nodes(recipe, "trainer")
    copy_bytes = memory_copy_bytes(recipe, nodes) if policy.memory_interval_steps else 0
    if copy_bytes:
        sends = " and sends it to the next" if nodes > 1 else ""
        rows["copies in memory"] = (
            f"every {policy.memory_interval_steps:,} steps a node writes {show_size(size / nodes)}{sends}; two states "
            f"take {show_size(copy_bytes)} of its /dev/shm"
        )
    if step is None:
        return rows
    shared = step.device.shared_memory_bytes
    if shared and copy_bytes > shared:
        rows["warning, copies in memory"] = (
            f"a container on {step.device.name} has {show_size(shared)} of /dev/shm, so the run would not start: take "
            f"more nodes, raise shared_memory_gib in infra/shapes.json, or leave checkpoint.memory_interval_steps out"
        )
    if copy_bytes and nodes > 1:
        rate = step.device.network_bytes_per_second
        rows["copies in memory"] += f". Sending takes {size / nodes / rate:,.1f} s at {rate / 1e9:,.0f} GB/s of a node"
    between, price = policy.interval_steps * step.seconds, step.price
    optimum = optimal_interval_steps(write_seconds, step.seconds, nodes, assumptions.node_mtbf_hours)
    # Until the next checkpoint is committed, a failure loses the steps since the one before, or the last copy.
    every = policy.interval_steps if nodes == 1 else policy.memory_interval_steps or policy.interval_steps
    lost_hours = (every * step.seconds + write_seconds) / SECONDS_PER_HOUR
    dollars = "" if price is None else f", ${lost_hours * nodes * price:,.0f}"
    written = "commit of their copy" if every == policy.memory_interval_steps else "write of the next checkpoint"
    rows["loss"] = (
        f"a failure without notice loses at most {lost_hours * 60:,.0f} min{dollars}: {every:,} steps and the {written}"
    )
    rows["Young's optimum"] = (
        f"every {optimum:,} steps ({optimum * step.seconds / 60:,.0f} min) if training stopped for the whole write. It "
        f"stops only for a copy to the host, which a run's summary measures, so shorter intervals cost less"
    )
    if write_seconds > between:
        rows["warning, interval"] = (
            f"a checkpoint takes longer than the {between:,.1f} s to the next one: raise checkpoint.interval_steps"
        )
    return rows


def _failures(recipe: Recipe, step: StepEstimate | None, assumptions: Assumptions) -> dict[str, str]:
    if step is None:
        return {"cost": "unknown: the recipe has no cluster.trainer_instance_type"}
    own, times, mtbf_hours = stage_nodes(recipe, "trainer"), run_times(recipe, assumptions), assumptions.node_mtbf_hours
    rows = {str(failure): str(cost) for failure, cost in failure_costs(recipe, own, times).items()}
    for nodes in dict.fromkeys((own, *assumptions.nodes)):
        costs = failure_costs(recipe, nodes, times)
        rows[f"goodput, {nodes:,} node{'s' * (nodes != 1)}"] = (
            f"{goodput(costs, nodes, mtbf_hours):.2%} of their time goes into steps that count, with a failure in "
            f"{mtbf_seconds(nodes, mtbf_hours) / SECONDS_PER_HOUR:,.1f} hours that costs "
            f"{mean_cost_seconds(costs) / 60:,.1f} min on average"
        )
    shares = ", ".join(f"{share:.0%} {failure}s" for failure, share in FAILURE_SHARES.items())
    return rows | {"kinds of failures": f"{shares}, as in the pre-training of Llama 3"}


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(len(name) for name in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])
