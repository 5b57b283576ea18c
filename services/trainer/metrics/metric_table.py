"""Lists the metrics of a step for all views: metrics.jsonl, TensorBoard, Prometheus, trackers and the README."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Metric:
    """A metric and its description.

    A record holds one number for the metric, or, if it has a label, a dict with one number for each value of the label.
    """

    name: str
    """Name of the field in metrics.jsonl; Prometheus puts `millrace_` before it."""
    unit: str
    reduction: str
    """Operation that makes one value of the workers' values."""
    help: str
    label: str | None = None
    """Name of the label, such as `group`; None if the metric is one number."""

    @property
    def field(self) -> str:
        """Name of the metric in tables: `name`, or `name{label}` if it has a label."""
        return f"{self.name}{{{self.label}}}" if self.label else self.name

    @property
    def description(self) -> str:
        """Explanation, unit and reduction in one line."""
        return f"{self.help} ({self.unit}; {self.reduction})"


_EQUAL = "equal on all"
_RANK_0 = "rank 0's"
_CLUSTERED = "clustered by document"

METRICS = (
    Metric("step", "steps", _EQUAL, "optimizer steps done; a rollback lowers this"),
    Metric("loss", "nats per token", "mean over the global batch", "cross-entropy"),
    Metric("loss_max", "nats per token", "max over micro-batches", "loss of the worst micro-batch; not on `xla`"),
    Metric("validation_loss", "nats per token", "mean over the targets", "cross-entropy of the newest evaluation"),
    Metric("validation_loss_standard_error", "nats per token", _CLUSTERED, "standard error of `validation_loss`"),
    Metric(
        "validation_loss_by_source",
        "nats per token",
        "mean over the targets",
        "loss of each source of the newest evaluation",
        "source",
    ),
    Metric("validation_perplexity", "1", "exp of the mean", "perplexity of the newest evaluation"),
    Metric("validation_bits_per_byte", "bits/byte", "sum / sum", "bits of the text's tokens over its UTF-8 bytes"),
    Metric("validation_tokens", "tokens", "sum", "targets of the newest evaluation"),
    Metric("evaluation_seconds", "s", _RANK_0, "seconds for which the newest evaluation stopped training"),
    Metric("gradient_norm", "1", "norm over all parameters", "gradient norm before clipping"),
    Metric("clipped_share", "share", _EQUAL, "steps with a clipped gradient, since the last `clipped_share`"),
    Metric("gradient_norm_by_group", "1", "norm over the group", "gradient norm before clipping", "group"),
    Metric(
        "update_ratio_by_group", "ratio", "ratio of norms", "norm of the update over the weights' before it", "group"
    ),
    Metric("largest_logit", "1", "max over the global batch", "largest logit of the model after the step"),
    Metric("activation_rms", "1", "rms over the global batch", "activations after the last layer, before its norm"),
    Metric("learning_rate", "1", _EQUAL, "learning rate of this step"),
    Metric("tokens", "tokens", "sum", "tokens trained on since the run began, without skipped steps"),
    Metric("tokens_per_second", "tokens/s", "sum", "tokens of this step over its seconds"),
    Metric("mean_tokens_per_second", "tokens/s", "sum", "mean of this process without its first step"),
    Metric("mfu", "share", "sum over the sum of peaks", "model FLOP/s over the peak, by PaLM's convention"),
    Metric("mfu_causal", "share", "sum over the sum of peaks", "as `mfu`, without the scores that causality masks"),
    Metric("step_seconds", "s", "max", "seconds from the first read of data to the update"),
    Metric("gradient_seconds_spread", "s", "max - min", "spread of the seconds until a worker has its own gradient"),
    Metric("slowest_rank", "rank", "argmax", "worker with the most such seconds in 10 steps; with several workers"),
    Metric(
        "straggler_score",
        "ratio",
        "max / min",
        "ratio of such seconds in 10 steps; with several workers",
    ),
    Metric("data_seconds", "s", "max", "seconds for which a step waits for its data"),
    Metric("data_share", "share", "max", "`data_seconds` over `step_seconds`"),
    Metric("checkpoint_stall_seconds", "s", _RANK_0, "seconds for which the newest checkpoint stopped training"),
    Metric("graphs_compiled", "graphs", "max", "compile misses of this process"),
    Metric("peak_rss_bytes", "bytes", "max", "largest host memory of a worker's process so far"),
    Metric("peak_device_bytes", "bytes", "max", "largest device memory of tensors so far; on `cuda`"),
    Metric("skipped_steps", "steps", _EQUAL, "steps without an update, because a gradient was not finite"),
    Metric("restarts", "starts", _RANK_0, "starts of the workers after the first one that took a step"),
    Metric("goodput", "share", _RANK_0, "productive seconds over seconds since the run began"),
)

_COMMAND = "of the command"

RUN_METRICS = (
    Metric("max_steps", "steps", _COMMAND, "steps after which the run ends"),
    Metric("start_time_seconds", "s since 1970", _COMMAND, "time at which the command began to train"),
    Metric("last_step_time_seconds", "s since 1970", _COMMAND, "time at which the newest step ended"),
    Metric("checkpoint_interval_steps", "steps", _COMMAND, "steps between two checkpoints"),
    Metric("checkpoint_step", "steps", _COMMAND, "step of the newest committed checkpoint; 0 before the first"),
    Metric("checkpoint_time_seconds", "s since 1970", _COMMAND, "time of the newest committed checkpoint"),
    Metric("heartbeat_age_seconds", "s", "max", "age of the oldest heartbeat of a worker"),
    Metric("events_total", "events", _COMMAND, "events of the run since the command began, by kind", "event"),
)
"""Metrics of a run besides those of its steps, which only Prometheus has."""


def known_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of METRICS that a record has; one of a metric with a label is named `metric/label value`."""
    found: dict[str, float] = {}
    for metric in METRICS:
        value = record.get(metric.name)
        if isinstance(value, dict):
            found |= {f"{metric.name}/{label_value}": float(number) for label_value, number in value.items()}
        elif value is not None:
            found[metric.name] = float(value)
    return found


class WorkerNumbers(NamedTuple):
    """A worker's measurements of a step. Unknown numbers are NaN."""

    gradient_seconds: float
    """Seconds until the worker had its own gradient, including the wait for data."""
    step_seconds: float
    data_seconds: float
    loss_max: float
    """Largest loss of the worker's micro-batches."""
    graphs_compiled: float
    peak_rss_bytes: float
    peak_device_bytes: float


UNKNOWN_NUMBERS = WorkerNumbers(*[math.nan] * len(WorkerNumbers._fields))


class ReducedNumbers(NamedTuple):
    """Measurements of a step, reduced over workers as METRICS says.

    A number that is not finite on one worker is NaN for all, so that finite losses do not hide a loss that is not.
    """

    largest: WorkerNumbers
    least_gradient_seconds: float

    @property
    def fields(self) -> dict[str, float]:
        """Values by the names of METRICS, without unknown ones."""
        fields = {
            **self.largest._asdict(),
            "gradient_seconds_spread": self.largest.gradient_seconds - self.least_gradient_seconds,
            "data_share": self.largest.data_seconds / self.largest.step_seconds,
            "graphs_compiled": int(self.largest.graphs_compiled),
        }
        return {name: value for name, value in fields.items() if name != "gradient_seconds" and not math.isnan(value)}
