"""Collects a run's metrics for Prometheus from the files of the run.

The command collects them: no step waits for a scrape, and restarted workers do not end a scrape.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.artifacts.checkpoint import checkpoint_id
from services.common.artifacts.manifest import MANIFEST
from services.common.process.stage_metrics import PREFIX
from services.common.process.telemetry import JsonLinesTail
from services.trainer.checkpoints.steps import newest_step
from services.trainer.health.silence import heartbeat_times
from services.trainer.job import Job
from services.trainer.metrics.events import EventTail, Kind
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS, Metric
from services.trainer.metrics.records import METRICS_FILE

COUNTER_SUFFIX = "_total"


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
            self._values["events_total"] = dict(self._counts)
            checkpoint_step, checkpoint_time = _find_checkpoint(self._job)
            values = self._values | {
                "checkpoint_step": checkpoint_step,
                "checkpoint_time_seconds": checkpoint_time,
                "heartbeat_age_seconds": _find_heartbeat_age(self._job),
            }
        for metric in (*METRICS, *RUN_METRICS):
            yield _make_family(metric, self._job.run, values)


def _make_family(metric: Metric, run: str, values: dict[str, Any]) -> Family:
    labels = ("run", metric.label) if metric.label else ("run",)
    kind = CounterMetricFamily if metric.name.endswith(COUNTER_SUFFIX) else GaugeMetricFamily
    family = kind(PREFIX + metric.name, metric.description, labels=labels)
    if metric.label:
        for label_value, number in values.get(metric.name, {}).items():
            family.add_metric((run, label_value), number)
    else:
        family.add_metric((run,), values.get(metric.name, math.nan))
    return family


def _find_checkpoint(job: Job) -> tuple[float, float]:
    """Return the step of the newest committed checkpoint and the time of its commit; 0 and NaN before the first."""
    try:
        step = newest_step(job.checkpoint_collection)
        if step is None:
            return 0.0, math.nan
        return step, (job.checkpoint_collection / checkpoint_id(step) / MANIFEST).stat().st_mtime
    except OSError:
        return math.nan, math.nan


def _find_heartbeat_age(job: Job) -> float:
    """Return the seconds since the oldest heartbeat of a worker; NaN while there is none."""
    try:
        oldest = min(heartbeat_times(job.run_folder).values(), default=math.nan)
    except OSError:
        return math.nan
    return time.time() - oldest / 1e9
