"""Chooses the charts of a run's report, in the order in which they tell how the run went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from services.common.recipe.schema import Recipe
from services.trainer.report.chart import (
    BYTES,
    L2_NORM,
    NATS_PER_TOKEN,
    RATIO,
    SECONDS,
    SHARE,
    Chart,
    Curve,
    Unit,
)
from services.trainer.report.run_curves import RunCurves
from services.trainer.report.shared_charts import (
    BITS_PER_BYTE_CHART,
    GOODPUT_CHART,
    GRADIENT_NORM_CHART,
    LEARNING_RATE_CHART,
    LOSS_CHART,
    MFU_CHART,
    THROUGHPUT_CHART,
)


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
    run = _ChartedRun(curves, events)
    learning = _chart_learning(run, recipe.optimizer.max_grad_norm)
    return [
        ChartSection("learning", "Does it learn?", "Loss first, and then what drives it.", learning),
        ChartSection("stability", "Is it stable?", "Numbers that move before a loss diverges.", _chart_stability(run)),
        ChartSection(
            "speed", "Is it fast, and does it waste time?", "Where the seconds and the memory go.", _chart_speed(run)
        ),
    ]


class _ChartedRun:
    """Curves of a run at the positions, and with the marks, that all its charts share."""

    def __init__(self, curves: RunCurves, events: Sequence[Mapping[str, Any]]) -> None:
        self.curves, self.positions, self.marks = curves, curves.positions, curves.marks(events)
        few_marks = [mark for mark in self.marks if mark.kind in _WHOLE_HEIGHT]
        self.make = partial(Chart, marks=few_marks, positions=self.positions)

    def share(self, chart: partial[Chart], healthy: str, curves: Sequence[Curve], **others: Any) -> Chart:
        """Make one of the charts of `shared_charts`, with the marks of this run unless `others` has other ones."""
        return chart(healthy, curves, **{**self.make.keywords, **others})

    def one(self, metric: str, name: str, color: int = 0) -> list[Curve]:
        return list(self.curves.curve(metric, name, self.positions, color))

    def smooth(self, metric: str, name: str, color: int = 0) -> list[Curve]:
        return list(self.curves.smoothed(metric, name, self.positions, color))


def _chart_learning(run: _ChartedRun, max_grad_norm: float) -> list[Chart]:
    return [
        run.share(
            LOSS_CHART,
            "Healthy: both fall, fast at first and then ever more slowly, and validation stays close to training.",
            [
                *run.smooth("loss", "training"),
                *run.curves.evaluation("loss", "validation", run.positions, 1, with_errors=True),
            ],
            marks=run.marks,
        ),
        run.make(
            "validation-by-source",
            "Validation loss by source",
            NATS_PER_TOKEN,
            "Healthy: every source falls; one that rises while the others fall is being forgotten or seen too often.",
            list(run.curves.evaluation_by_source("loss", run.positions)),
            may_be_logarithmic=True,
        ),
        run.share(
            BITS_PER_BYTE_CHART,
            "Healthy: falls with the loss. It can be compared between runs with different vocabularies.",
            list(run.curves.evaluation("bits_per_byte", "validation", run.positions, 1)),
        ),
        run.make(
            "worst-micro-batch",
            "Loss of the worst micro-batch",
            NATS_PER_TOKEN,
            "Healthy: keeps a constant distance from the loss; single peaks are hard documents.",
            run.smooth("loss_max", "worst micro-batch"),
            may_be_logarithmic=True,
        ),
        run.share(
            GRADIENT_NORM_CHART,
            "Healthy: high in the first steps, then level; a slow rise or many peaks announce that the loss diverges.",
            run.smooth("gradient_norm", "gradient"),
            reference=("clipped above", max_grad_norm),
        ),
        run.share(
            LEARNING_RATE_CHART,
            "Healthy: rises in the warm-up, then falls as the recipe's schedule says.",
            run.one("learning_rate", "learning rate"),
        ),
    ]


def _chart_stability(run: _ChartedRun) -> list[Chart]:
    return [
        run.make(
            "clipped",
            "Share of clipped steps",
            SHARE,
            "Healthy: nearly none after the warm-up; if most steps are clipped, the learning rate is too high.",
            run.one("clipped_share", "clipped steps"),
            begins_at_zero=True,
        ),
        run.make(
            "gradient-by-group",
            "Gradient norm by group",
            L2_NORM,
            "Healthy: no group of layers is orders of magnitude above or below the others.",
            run.one("gradient_norm_by_group", "gradient"),
            may_be_logarithmic=True,
        ),
        run.make(
            "update-by-group",
            "Norm of the update over the weights'",
            RATIO,
            "Healthy: near 0.001 while the learning rate is high, alike in all groups.",
            run.one("update_ratio_by_group", "update"),
            may_be_logarithmic=True,
        ),
        run.make(
            "largest-logit",
            "Largest logit",
            Unit("logit"),
            "Healthy: settles at some tens; a steady rise into the hundreds makes training in bfloat16 unstable.",
            run.one("largest_logit", "largest logit"),
        ),
        run.make(
            "activations",
            "Activations after the last layer",
            Unit("root mean square"),
            "Healthy: settles; growth without an end announces an overflow.",
            run.one("activation_rms", "activations"),
            begins_at_zero=True,
        ),
    ]


def _chart_speed(run: _ChartedRun) -> list[Chart]:
    spread = run.smooth("gradient_seconds_spread", "spread between fastest and slowest", 1)
    if not any(point.value for curve in spread for point in curve.points):  # a single worker has no spread
        spread = []
    return [
        run.share(
            THROUGHPUT_CHART,
            "Healthy: level. First steps of processes, which load or compile graphs, are left out here.",
            run.smooth("tokens_per_second", "all workers"),
        ),
        run.share(
            MFU_CHART,
            "Healthy: level, and as high as other runs of this model on these devices.",
            [*run.smooth("mfu", "PaLM's convention"), *run.smooth("mfu_causal", "causal attention counted once", 1)],
        ),
        run.share(
            GOODPUT_CHART,
            "Healthy: rises towards 100% and falls only at restarts: the share of all time that made progress.",
            run.one("goodput", "goodput"),
        ),
        run.make(
            "step-time",
            "Step time",
            SECONDS,
            "Healthy: level and without peaks; workers that wait for one slow worker show as a spread.",
            [
                *run.smooth("step_seconds", "slowest worker"),
                *spread,
            ],
            marks=[mark for mark in run.marks if mark.kind in (*_WHOLE_HEIGHT, "straggler")],
            begins_at_zero=True,
            may_be_logarithmic=True,
        ),
        run.make(
            "stragglers",
            "Slowest worker over the median",
            RATIO,
            "Healthy: close to 1; a worker that stays far above it should be set aside.",
            run.one("straggler_score", "slowest over median"),
        ),
        run.make(
            "data-wait",
            "Wait for data",
            SHARE,
            "Healthy: below 1% of a step; more means that the file system or the reader is too slow.",
            run.smooth("data_share", "share of a step"),
            begins_at_zero=True,
        ),
        run.make(
            "checkpoint-stall",
            "Stop for a checkpoint",
            SECONDS,
            "Healthy: level and short: training goes on while the checkpoint is written.",
            run.one("checkpoint_stall_seconds", "stop"),
            begins_at_zero=True,
        ),
        run.make(
            "evaluation-time",
            "Stop for an evaluation",
            SECONDS,
            "Healthy: level, and a small share of the time between two evaluations.",
            list(run.curves.evaluation("seconds", "evaluation", run.positions, 1)),
            begins_at_zero=True,
        ),
        run.make(
            "memory",
            "Memory, largest worker so far",
            BYTES,
            "Healthy: level after the first steps; a steady rise is a leak that ends the run.",
            [*run.one("peak_rss_bytes", "host memory"), *run.one("peak_device_bytes", "device memory", 1)],
            begins_at_zero=True,
        ),
    ]
