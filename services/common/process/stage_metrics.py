"""Metrics of every stage for Prometheus, its progress and the space of its file system, and the server of metrics."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.errors import RecipeError
from services.common.process.progress import current_progress

PREFIX = "millrace_"
"""Prefix of the name of every metric."""

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
        if record is None:
            return
        for name, description in PROGRESS_METRICS.items():
            value: float | None = getattr(record, name.removeprefix("stage_progress_"))
            family = GaugeMetricFamily(PREFIX + name, description, labels=("stage", "phase", "unit"))
            family.add_metric((record.stage, record.phase, record.unit), math.nan if value is None else value)
            yield family
        for (name, description), num_bytes in zip(FILE_SYSTEM_METRICS.items(), self._measure_space(), strict=True):
            family = GaugeMetricFamily(PREFIX + name, description, labels=("stage",))
            family.add_metric((record.stage,), num_bytes)
            yield family

    def _measure_space(self) -> tuple[float, float]:
        """Return the size of the root's file system and the space that is left, in bytes; NaN where it is unknown."""
        try:
            there = (each for each in (self._root, *self._root.parents) if each.exists())  # the root may come later
            usage = shutil.disk_usage(next(there))
        except OSError:  # a lost mount
            return math.nan, math.nan
        return usage.used + usage.free, usage.free  # as `df`: without the blocks that only root may use


@contextmanager
def serve_metrics(collectors: Iterable[Collector], host: str, port: int) -> Iterator[None]:
    """Serve `/metrics` during the block. Port 0 lets the system choose one.

    Raises `RecipeError` if the server cannot listen on the port.
    """
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise RecipeError(
            f"--metrics-port {port}: cannot listen on {host}: {error}. Pass a free port, and an address of this "
            f"machine as --metrics-host."
        ) from error
    print(f"metrics are at http://{host}:{server.server_port}/metrics", flush=True)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
