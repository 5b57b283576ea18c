"""Collects what Prometheus shows of every stage: its progress, and the space of its file system."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.process.file_system_space import measure_space
from services.common.process.metrics_server import PREFIX
from services.common.process.progress_record import current_progress

PROGRESS_METRICS = {
    "stage_progress_done": "work done in the stage's present phase, in the label's unit",
    "stage_progress_total": "work of the stage's present phase, in the label's unit; 0 where it is not measured",
    "stage_progress_per_second": "rate of the last minutes, in the label's unit per second",
    "stage_progress_seconds_left": "seconds until the end of the phase at this rate; NaN in a hang",
}
"""Metrics with the labels `stage`, `phase` and `unit`."""
FILE_SYSTEM_METRICS = {
    "file_system_size_bytes": "size of the file system of `--root`",
    "file_system_available_bytes": "space of the file system of `--root` that is left",
}
"""Metrics with the label `stage`."""


class StageMetrics(Collector):
    """Collects PROGRESS_METRICS and FILE_SYSTEM_METRICS of the stage that this process runs; unknown values are NaN."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def collect(self) -> Iterable[Metric]:
        record = current_progress()
        for name, description in PROGRESS_METRICS.items():
            family = GaugeMetricFamily(PREFIX + name, description, labels=("stage", "phase", "unit"))
            if record:
                value: float | None = getattr(record, name.removeprefix("stage_progress_"))
                family.add_metric((record.stage, record.phase, record.unit), math.nan if value is None else value)
            yield family
        for (name, description), num_bytes in zip(FILE_SYSTEM_METRICS.items(), self._measure_space(), strict=True):
            family = GaugeMetricFamily(PREFIX + name, description, labels=("stage",))
            if record:
                family.add_metric((record.stage,), num_bytes)
            yield family

    def _measure_space(self) -> tuple[float, float]:
        """Return the size of the root's file system and the space that is left, in bytes; NaN where it is unknown."""
        root = next((each for each in (self._root, *self._root.parents) if each.exists()), self._root)
        try:
            return measure_space(root)
        except OSError:
            return math.nan, math.nan
