"""Collects a run's metrics for Prometheus from the files of the run.

The command collects them: no step waits for a scrape, and restarted workers do not end a scrape.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, get_args

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.artifacts.checkpoint import checkpoint_id
from services.common.artifacts.manifest import MANIFEST
from services.common.process.stage_metrics import PREFIX
from services.common.process.telemetry import JsonLinesTail
from services.trainer.checkpoints.steps import newest_step
from services.trainer.health.heartbeats import heartbeat_times
from services.trainer.job import Job
from services.trainer.metrics.events import EventTail, Kind
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS
from services.trainer.metrics.records import METRICS_FILE


class RunCollector(Collector):
    """Collects METRICS and RUN_METRICS of a run from what it writes from now on.

    A scrape costs one `stat` a worker, the list of the run's checkpoints, and the lines that were appended since the
    last scrape. An unknown number is NaN; a metric with a label has no series before its first value.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()  # scrapes may overlap
        self._steps, self._events = JsonLinesTail(job.run_folder / METRICS_FILE, from_end=True), EventTail(job)
        self._counts = Counter(dict.fromkeys(get_args(Kind), 0))  # from 0 on, so that an increase shows the first event
        self._values: dict[str, Any] = {
            "max_steps": job.recipe.train.max_steps,
            "start_time_seconds": time.time(),
            "checkpoint_interval_steps": job.recipe.checkpoint.interval_steps,
        }

    def collect(self) -> Iterable[Family]:
        with self._lock:
            for record in self._steps.read():
                self._values |= record | {"last_step_time_seconds": record["time"]}
            self._counts.update(event["event"] for event in self._events.read())
            values = self._values | {"events_total": dict(self._counts)} | _read_file_times(self._job)
        for metric in (*METRICS, *RUN_METRICS):
            kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            labels = ("run", metric.label) if metric.label else ("run",)
            family = kind(PREFIX + metric.name, metric.description, labels=labels)
            value = values.get(metric.name, {} if metric.label else math.nan)
            for label_value, number in value.items() if metric.label else [("", value)]:
                family.add_metric((self._job.run, label_value)[: len(labels)], number)
            yield family


def _read_file_times(job: Job) -> dict[str, float]:
    """Return what the newest checkpoint and the workers' heartbeats tell, as far as they can be read."""
    found: dict[str, float] = {}
    with suppress(OSError):
        if step := newest_step(job.checkpoint_collection):
            manifest = job.checkpoint_collection / checkpoint_id(step) / MANIFEST
            found["checkpoint_time_seconds"] = manifest.stat().st_mtime
        found["checkpoint_step"] = step or 0
    with suppress(OSError):
        if times := heartbeat_times(job.run_folder).values():
            found["heartbeat_age_seconds"] = time.time() - min(times) / 1e9
    return found
