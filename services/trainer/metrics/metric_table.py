"""What is measured of a step, once for all views: metrics.jsonl, TensorBoard, Prometheus, trackers and the README."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Metric:
    name: str
    """Of the field in metrics.jsonl; Prometheus puts PREFIX before it."""
    unit: str
    reduction: str
    """How the workers' values become one."""
    help: str


PREFIX = "millrace_"
_EQUAL = "equal on all"
_RANK_0 = "rank 0's"

METRICS = (
    Metric("step", "steps", _EQUAL, "optimizer steps done; a rollback lowers it"),
    Metric("loss", "nats per token", "mean over the global batch", "cross-entropy"),
    Metric("loss_max", "nats per token", "max over micro-batches", "loss of the worst micro-batch; not on `xla`"),
    Metric("validation_loss", "nats per token", "mean over the batches", "of the newest evaluation"),
    Metric("gradient_norm", "1", "norm over all parameters", "before clipping"),
    Metric("learning_rate", "1", _EQUAL, "of this step"),
    Metric("tokens", "tokens", "sum", "trained on since the begin of the run"),
    Metric("tokens_per_second", "tokens/s", "sum", "of this step"),
    Metric("mean_tokens_per_second", "tokens/s", "sum", "of this process, its first step left out"),
    Metric("mfu", "share", "sum over the sum of peaks", "model FLOP/s over the peak; from a process's second step on"),
    Metric("step_seconds", "s", "max", "from the first read of data to the update"),
    Metric("gradient_seconds_spread", "s", "max - min", "of the time until a worker has its own gradient"),
    Metric("slowest_rank", "rank", "argmax", "of that time, over 10 steps; with several workers"),
    Metric("straggler_score", "ratio", "max / median", "of that time, over 10 steps; with several workers"),
    Metric("data_seconds", "s", "max", "a step's wait for its data"),
    Metric("data_share", "share", "max", "`data_seconds` over `step_seconds`"),
    Metric("checkpoint_stall_seconds", "s", _RANK_0, "that training stood still for the newest checkpoint"),
    Metric("graphs_compiled", "graphs", "max", "compile misses of this process"),
    Metric("peak_rss_bytes", "bytes", "max", "most memory of the host that a worker's process had"),
    Metric("peak_device_bytes", "bytes", "max", "most memory of the device that tensors had; on `cuda`"),
    Metric("skipped_steps", "steps", _EQUAL, "updated nothing, for a gradient was not finite"),
    Metric("restarts", "starts", _RANK_0, "of the workers, after the first that took a step"),
    Metric("goodput", "share", _RANK_0, "productive time over time since the run began"),
)


class WorkerNumbers(NamedTuple):
    """What a worker tells the others of a step. What it cannot know is NaN."""

    gradient_seconds: float
    """Until its own gradient was there, the wait for data included."""
    step_seconds: float
    data_seconds: float
    loss_max: float
    """Of its micro-batches."""
    graphs_compiled: float
    peak_rss_bytes: float
    peak_device_bytes: float
    gemm_flops_per_second: float
    """Its share of the peak of its machine, once that was measured."""


class ReducedNumbers(NamedTuple):
    fields: dict[str, float]
    """By the names of METRICS; those that nobody knows are left out."""
    gemm_flops_per_second: float
    """Of all workers together; NaN while one has not measured it."""


def reduce_over_ranks(workers: Sequence[WorkerNumbers]) -> ReducedNumbers:
    """What METRICS says of the workers' `WorkerNumbers`.

    A loss of one worker that is no number is the result's: it must not hide behind those that are.
    """
    columns = dict(zip(WorkerNumbers._fields, zip(*workers, strict=True), strict=True))
    most = {name: math.nan if any(map(math.isnan, values)) else max(values) for name, values in columns.items()}
    fields = {
        **{name: most[name] for name in ("step_seconds", "data_seconds", "loss_max", "peak_rss_bytes")},
        "gradient_seconds_spread": most["gradient_seconds"] - min(columns["gradient_seconds"]),
        "data_share": most["data_seconds"] / most["step_seconds"],
        "graphs_compiled": int(most["graphs_compiled"]),
        "peak_device_bytes": most["peak_device_bytes"],
    }
    known = {name: value for name, value in fields.items() if not math.isnan(value)}
    return ReducedNumbers(known, sum(columns["gemm_flops_per_second"]))
