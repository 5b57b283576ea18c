"""Chooses the charts of a run's report, in the order in which they tell how the run went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from services.common.recipe.schema import Recipe
from services.trainer.report.chart import (
    BITS_PER_BYTE,
    BYTES,
    NATS_PER_TOKEN,
    NO_UNIT,
    RATIO,
    SECONDS,
    SHARE,
    TOKENS_PER_SECOND,
    Chart,
    Curve,
    Unit,
)
from services.trainer.report.run_curves import RunCurves


class ChartSection(NamedTuple):
    """Charts under a common heading."""

    identifier: str
    title: str
    lead: str
    charts: list[Chart]


MARKS = {
    "checkpoint": "checkpoint",
    "restart": "restart of the workers",
    "rollback": "rollback before a loss spike",
    "skipped": "skipped step",
    "straggler": "straggler",
}
"""Kinds of marks and what they stand for."""
_WHOLE_HEIGHT = ("restart", "rollback")
"""Kinds that every chart shows; those that may be many are shown by the loss and the step time alone."""


def make_charts(curves: RunCurves, recipe: Recipe, events: Sequence[Mapping[str, Any]]) -> list[ChartSection]:
    """Return the sections of charts; a chart without a curve has an empty list of curves."""
    at = curves.positions
    all_marks = curves.marks(events)
    few_marks = [mark for mark in all_marks if mark.kind in _WHOLE_HEIGHT]

    def one(metric: str, name: str, color: int = 0) -> list[Curve]:
        return list(curves.curve(metric, name, at, color))

    def smooth(metric: str, name: str, color: int = 0) -> list[Curve]:
        return list(curves.smoothed(metric, name, at, color))

    make = partial(Chart, marks=few_marks, positions=at)
    learning = [
        make(
            "loss",
            "Loss",
            NATS_PER_TOKEN,
            "Healthy: both fall, fast at first and then ever more slowly, and validation stays close to training.",
            [
                *smooth("loss", "training"),
                *curves.evaluation("loss", "validation", at, 1, with_errors=True),
            ],
            marks=all_marks,
            may_be_logarithmic=True,
            is_wide=True,
        ),
        make(
            "validation-by-source",
            "Validation loss by source",
            NATS_PER_TOKEN,
            "Healthy: every source falls; one that rises while the others fall is being forgotten or seen too often.",
            list(curves.evaluation_by_source("loss", at)),
            may_be_logarithmic=True,
        ),
        make(
            "bits-per-byte",
            "Validation, bits per byte",
            BITS_PER_BYTE,
            "Healthy: falls with the loss. It can be compared between runs with different vocabularies.",
            list(curves.evaluation("bits_per_byte", "validation", at, 1)),
            may_be_logarithmic=True,
        ),
        make(
            "worst-micro-batch",
            "Loss of the worst micro-batch",
            NATS_PER_TOKEN,
            "Healthy: keeps a constant distance from the loss; single peaks are hard documents.",
            smooth("loss_max", "worst micro-batch"),
            may_be_logarithmic=True,
        ),
        make(
            "gradient-norm",
            "Gradient norm before clipping",
            Unit("L2 norm"),
            "Healthy: high in the first steps, then level; a slow rise or many peaks announce that the loss diverges.",
            smooth("gradient_norm", "gradient"),
            reference=("clipped above", recipe.optimizer.max_grad_norm),
            may_be_logarithmic=True,
        ),
        make(
            "learning-rate",
            "Learning rate",
            NO_UNIT,
            "Healthy: rises in the warm-up, then falls as the recipe's schedule says.",
            one("learning_rate", "learning rate"),
            may_be_logarithmic=True,
        ),
    ]
    stability = [
        make(
            "clipped",
            "Share of clipped steps",
            SHARE,
            "Healthy: nearly none after the warm-up; if most steps are clipped, the learning rate is too high.",
            one("clipped_share", "clipped steps"),
            begins_at_zero=True,
        ),
        make(
            "gradient-by-group",
            "Gradient norm by group",
            Unit("L2 norm"),
            "Healthy: no group of layers is orders of magnitude above or below the others.",
            one("gradient_norm_by_group", "gradient"),
            may_be_logarithmic=True,
        ),
        make(
            "update-by-group",
            "Norm of the update over the weights'",
            RATIO,
            "Healthy: near 0.001 while the learning rate is high, alike in all groups.",
            one("update_ratio_by_group", "update"),
            may_be_logarithmic=True,
        ),
        make(
            "largest-logit",
            "Largest logit",
            Unit("logit"),
            "Healthy: settles at some tens; a steady rise into the hundreds makes training in bfloat16 unstable.",
            one("largest_logit", "largest logit"),
        ),
        make(
            "activations",
            "Activations after the last layer",
            Unit("root mean square"),
            "Healthy: settles; growth without an end announces an overflow.",
            one("activation_rms", "activations"),
            begins_at_zero=True,
        ),
    ]
    spread = smooth("gradient_seconds_spread", "spread between fastest and slowest", 1)
    if not any(point.value for curve in spread for point in curve.points):  # a single worker has no spread
        spread = []
    speed = [
        make(
            "throughput",
            "Throughput",
            TOKENS_PER_SECOND,
            "Healthy: level. First steps of processes, which load or compile graphs, are left out here.",
            smooth("tokens_per_second", "all workers"),
            begins_at_zero=True,
        ),
        make(
            "mfu",
            "Model FLOPs utilization (MFU)",
            SHARE,
            "Healthy: level, and as high as other runs of this model on these devices.",
            [*smooth("mfu", "PaLM's convention"), *smooth("mfu_causal", "causal attention counted once", 1)],
            begins_at_zero=True,
        ),
        make(
            "goodput",
            "Goodput",
            SHARE,
            "Healthy: rises towards 100% and falls only at restarts: the share of all time that made progress.",
            one("goodput", "goodput"),
            begins_at_zero=True,
        ),
        make(
            "step-time",
            "Step time",
            SECONDS,
            "Healthy: level and without peaks; workers that wait for one slow worker show as a spread.",
            [
                *smooth("step_seconds", "slowest worker"),
                *spread,
            ],
            marks=[mark for mark in all_marks if mark.kind in (*_WHOLE_HEIGHT, "straggler")],
            begins_at_zero=True,
            may_be_logarithmic=True,
        ),
        make(
            "stragglers",
            "Slowest worker over the median",
            RATIO,
            "Healthy: close to 1; a worker that stays far above it should be set aside.",
            one("straggler_score", "slowest over median"),
        ),
        make(
            "data-wait",
            "Wait for data",
            SHARE,
            "Healthy: below 1% of a step; more means that the file system or the reader is too slow.",
            smooth("data_share", "share of a step"),
            begins_at_zero=True,
        ),
        make(
            "checkpoint-stall",
            "Stop for a checkpoint",
            SECONDS,
            "Healthy: level and short: training goes on while the checkpoint is written.",
            one("checkpoint_stall_seconds", "stop"),
            begins_at_zero=True,
        ),
        make(
            "evaluation-time",
            "Stop for an evaluation",
            SECONDS,
            "Healthy: level, and a small share of the time between two evaluations.",
            list(curves.evaluation("seconds", "evaluation", at, 1)),
            begins_at_zero=True,
        ),
        make(
            "memory",
            "Memory, largest worker so far",
            BYTES,
            "Healthy: level after the first steps; a steady rise is a leak that ends the run.",
            [*one("peak_rss_bytes", "host memory"), *one("peak_device_bytes", "device memory", 1)],
            begins_at_zero=True,
        ),
    ]
    return [
        ChartSection("learning", "Does it learn?", "Loss first, and then what drives it.", learning),
        ChartSection("stability", "Is it stable?", "Numbers that move before a loss diverges.", stability),
        ChartSection("speed", "Is it fast, and does it waste time?", "Where the seconds and the memory go.", speed),
    ]
