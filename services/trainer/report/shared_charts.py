"""The charts that a run's report and a comparison of runs have in common: their names, titles, units and axes.

Each is called with the sentence that says what to look for, and with the curves.
"""

from __future__ import annotations

from functools import partial

from services.trainer.report.chart import (
    BITS_PER_BYTE,
    L2_NORM,
    NATS_PER_TOKEN,
    NO_UNIT,
    SHARE,
    TOKENS_PER_SECOND,
    Chart,
)

LOSS_CHART = partial(Chart, "loss", "Loss", NATS_PER_TOKEN, may_be_logarithmic=True, is_wide=True)
BITS_PER_BYTE_CHART = partial(Chart, "bits-per-byte", "Validation in bits", BITS_PER_BYTE, may_be_logarithmic=True)
GRADIENT_NORM_CHART = partial(Chart, "gradient-norm", "Gradient norm before clipping", L2_NORM, may_be_logarithmic=True)
LEARNING_RATE_CHART = partial(Chart, "learning-rate", "Learning rate", NO_UNIT, may_be_logarithmic=True)
THROUGHPUT_CHART = partial(Chart, "throughput", "Throughput", TOKENS_PER_SECOND, begins_at_zero=True)
MFU_CHART = partial(Chart, "mfu", "Model FLOPs utilization (MFU)", SHARE, begins_at_zero=True)
GOODPUT_CHART = partial(Chart, "goodput", "Goodput", SHARE, begins_at_zero=True)
