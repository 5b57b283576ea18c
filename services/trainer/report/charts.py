"""The charts of a run's report and of a comparison of runs, in the order in which they tell how a run went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Series(NamedTuple):
    """What a chart draws of one metric of the step records, or of `evaluation.FIELD`."""

    metric: str
    name: str = ""
    color: int = 0
    is_smooth: bool = False
    """Whether a moving mean is drawn over the curve of all steps."""
    errors: str = ""
    """Metric of the error bars."""


@dataclass(frozen=True)
class Chart:
    """A chart without its data. The script formats `unit`, and draws the `marks` of these kinds."""

    id: str
    title: str
    unit: str
    advice: str
    """A sentence that says what to look for."""
    series: tuple[Series, ...]
    marks: tuple[str, ...] = ("restart", "rollback")
    allows_logarithmic: bool = False
    includes_zero: bool = False
    is_wide: bool = False
    compared: str = ""
    """The advice in a comparison of runs, which has the first series alone; empty if it leaves the chart out."""


class ChartSection(NamedTuple):
    """Charts under a common heading."""

    id: str
    title: str
    lead: str
    charts: tuple[Chart, ...]


MARKS = {
    "checkpoint": "checkpoint",
    "restart": "restart of the workers",
    "rollback": "rollback before a loss spike",
    "skipped": "skipped step",
    "straggler": "straggler",
}
"""Kinds of marks and what they stand for."""

LEARNING = ChartSection(
    "learning",
    "Does it learn?",
    "Loss first, and then what drives it.",
    (
        Chart(
            "loss",
            "Loss",
            "nats per token",
            "Healthy: both fall, fast at first and then ever more slowly, and validation stays close to training.",
            (
                Series("loss", "training", is_smooth=True),
                Series("evaluation.loss", "validation", 1, errors="evaluation.standard_error"),
            ),
            marks=tuple(MARKS),
            allows_logarithmic=True,
            is_wide=True,
            compared="Better: lower after the same tokens. It compares runs of one vocabulary and corpus alone.",
        ),
        Chart(
            "validation-by-source",
            "Validation loss by source",
            "nats per token",
            "Healthy: every source falls; one that rises while the others fall is being forgotten or seen too often.",
            (Series("evaluation.loss_by_source"),),
            allows_logarithmic=True,
        ),
        Chart(
            "bits-per-byte",
            "Validation in bits",
            "bits per byte",
            "Healthy: falls with the loss. It can be compared between runs with different vocabularies.",
            (Series("evaluation.bits_per_byte", "validation", 1),),
            allows_logarithmic=True,
            compared="Better: lower. It compares runs with different vocabularies, too.",
        ),
        Chart(
            "worst-micro-batch",
            "Loss of the worst micro-batch",
            "nats per token",
            "Healthy: keeps a constant distance from the loss; single peaks are hard documents.",
            (Series("loss_max", "worst micro-batch", is_smooth=True),),
            allows_logarithmic=True,
        ),
        Chart(
            "gradient-norm",
            "Gradient norm before clipping",
            "L2 norm",
            "Healthy: high in the first steps, then level; a slow rise or many peaks announce that the loss diverges.",
            (Series("gradient_norm", "gradient", is_smooth=True),),
            allows_logarithmic=True,
            compared="Better: level and without peaks; a run whose norm rises above the others' is about to diverge.",
        ),
        Chart(
            "learning-rate",
            "Learning rate",
            "no unit",
            "Healthy: rises in the warm-up, then falls as the recipe's schedule says.",
            (Series("learning_rate", "learning rate"),),
            allows_logarithmic=True,
            compared="It shows where the schedules differ, which explains most differences of the loss.",
        ),
    ),
)

STABILITY = ChartSection(
    "stability",
    "Is it stable?",
    "Numbers that move before a loss diverges.",
    (
        Chart(
            "clipped",
            "Share of clipped steps",
            "share",
            "Healthy: nearly none after the warm-up; if most steps are clipped, the learning rate is too high.",
            (Series("clipped_share", "clipped steps"),),
            includes_zero=True,
        ),
        Chart(
            "gradient-by-group",
            "Gradient norm by group",
            "L2 norm",
            "Healthy: no group of layers is orders of magnitude above or below the others.",
            (Series("gradient_norm_by_group"),),
            allows_logarithmic=True,
        ),
        Chart(
            "update-by-group",
            "Norm of the update over the weights'",
            "ratio",
            "Healthy: near 0.001 while the learning rate is high, alike in all groups.",
            (Series("update_ratio_by_group"),),
            allows_logarithmic=True,
        ),
        Chart(
            "largest-logit",
            "Largest logit",
            "logit",
            "Healthy: settles at some tens; a steady rise into the hundreds makes training in bfloat16 unstable.",
            (Series("largest_logit", "largest logit"),),
        ),
        Chart(
            "activations",
            "Activations after the last layer",
            "root mean square",
            "Healthy: settles; growth without an end announces an overflow.",
            (Series("activation_rms", "activations"),),
            includes_zero=True,
        ),
    ),
)

SPEED = ChartSection(
    "speed",
    "Is it fast, and does it waste time?",
    "Where the seconds and the memory go.",
    (
        Chart(
            "throughput",
            "Throughput",
            "tokens per second",
            "Healthy: level. First steps of processes, which load or compile graphs, are left out here.",
            (Series("tokens_per_second", "all workers", is_smooth=True),),
            includes_zero=True,
            compared="Better: higher on the same nodes. First steps of processes are left out.",
        ),
        Chart(
            "mfu",
            "Model FLOPs utilization (MFU)",
            "share",
            "Healthy: level, and as high as other runs of this model on these devices.",
            (
                Series("mfu", "PaLM's convention", is_smooth=True),
                Series("mfu_causal", "causal attention counted once", 1, is_smooth=True),
            ),
            includes_zero=True,
            compared="Better: higher. It compares runs on different numbers of devices.",
        ),
        Chart(
            "goodput",
            "Goodput",
            "share",
            "Healthy: rises towards 100% and falls only at restarts: the share of all time that made progress.",
            (Series("goodput", "goodput"),),
            includes_zero=True,
            compared="Better: higher: the share of all time that made progress.",
        ),
        Chart(
            "step-time",
            "Step time",
            "seconds",
            "Healthy: level and without peaks; workers that wait for one slow worker show as a spread.",
            (
                Series("step_seconds", "slowest worker", is_smooth=True),
                Series("gradient_seconds_spread", "spread between fastest and slowest", 1, is_smooth=True),
            ),
            marks=("restart", "rollback", "straggler"),
            includes_zero=True,
            allows_logarithmic=True,
        ),
        Chart(
            "stragglers",
            "Slowest worker over the median",
            "ratio",
            "Healthy: close to 1; a worker that stays far above it should be set aside.",
            (Series("straggler_score", "slowest over median"),),
        ),
        Chart(
            "data-wait",
            "Wait for data",
            "share",
            "Healthy: below 1% of a step; more means that the file system or the reader is too slow.",
            (Series("data_share", "share of a step", is_smooth=True),),
            includes_zero=True,
        ),
        Chart(
            "checkpoint-stall",
            "Stop for a checkpoint",
            "seconds",
            "Healthy: level and short: training goes on while the checkpoint is written.",
            (Series("checkpoint_stall_seconds", "stop"),),
            includes_zero=True,
        ),
        Chart(
            "evaluation-time",
            "Stop for an evaluation",
            "seconds",
            "Healthy: level, and a small share of the time between two evaluations.",
            (Series("evaluation.seconds", "evaluation", 1),),
            includes_zero=True,
        ),
        Chart(
            "memory",
            "Memory, largest worker so far",
            "bytes",
            "Healthy: level after the first steps; a steady rise is a leak that ends the run.",
            (Series("peak_rss_bytes", "host memory"), Series("peak_device_bytes", "device memory", 1)),
            includes_zero=True,
        ),
    ),
)

REPORT = (LEARNING, STABILITY, SPEED)

VALIDATION_LOSS = Chart(
    "validation-loss",
    "Validation loss",
    "nats per token",
    "Better: lower after the same tokens. It is less noisy than the training loss.",
    (Series("evaluation.loss"),),
    allows_logarithmic=True,
)
"""A chart of comparisons. A report draws it within the chart of the loss."""

CHARTED_METRICS = frozenset(series.metric for section in REPORT for chart in section.charts for series in chart.series)
"""Metrics of step records and evaluations that some chart draws."""
