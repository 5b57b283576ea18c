"""Collects a run's metrics for Prometheus from the files of the run.

The command collects them: no step waits for a scrape, and restarted workers do not end a scrape.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import get_args

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.artifacts.checkpoint import checkpoint_id
from services.common.artifacts.manifest import MANIFEST
from services.common.errors import MillraceError
from services.common.process.metrics_server import PREFIX
from services.trainer.checkpoints.steps import newest_step
from services.trainer.health.silence import heartbeat_times
from services.trainer.job import Job
from services.trainer.metrics.events import EventTail, Kind
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS, Metric, Sample, find_samples
from services.trainer.metrics.records import MetricsTail

COUNTER_SUFFIX = "_total"
"""End of the name of every metric that only grows."""


def collect_run(job: Job) -> tuple[Collector, ...]:
    """Return the collectors of all metrics of a run, which begin with what the run writes from now on."""
    return NewestMetrics(job.run_folder, job.run), RunCollector(job)


class NewestMetrics(Collector):
    """Collects the newest value of each metric of a step, from records that a run appends from now on.

    Before its first value a metric is NaN; one with a label has no series then.
    """

    def __init__(self, run_folder: Path, run: str) -> None:
        self._tail, self._run = MetricsTail(run_folder), run
        self._lock = threading.Lock()  # scrapes may overlap
        self._newest = {metric.name: [] if metric.label else [Sample(metric, None, math.nan)] for metric in METRICS}

    def collect(self) -> Iterable[Family]:
        with self._lock:
            for record in self._tail.read():
                by_metric = groupby(find_samples(record), key=lambda sample: sample.metric.name)
                self._newest |= {name: list(samples) for name, samples in by_metric}
            newest = dict(self._newest)
        for metric in METRICS:
            family = _make_family(metric)
            for sample in newest[metric.name]:
                family.add_metric((self._run, *sample.labels.values()), sample.value)
            yield family


class RunCollector(Collector):
    """Collects the metrics of a run besides those of its steps: RUN_METRICS.

    A scrape costs one `stat` a worker, the list of the run's checkpoints, and the lines that were appended since the
    last scrape, whatever the length of the run. A value that cannot be read is NaN.
    """

    def __init__(self, job: Job, now: Callable[[], float] = time.time) -> None:
        """`now` returns the seconds since 1970."""
        self._job, self._now = job, now
        self._lock = threading.Lock()  # scrapes may overlap
        self._steps, self._last_step_time = MetricsTail(job.run_folder), math.nan
        self._events, self._counts = EventTail(job), Counter[str]()
        self._start_time = now()
        self._heartbeats: dict[str, tuple[int, float]] = {}
        """The time of each file of a worker's heartbeat, and that of the first scrape that saw it."""

    def collect(self) -> Iterable[Family]:
        with self._lock:
            values = self._read()
            counts = dict(self._counts)
        for metric in RUN_METRICS:
            family = _make_family(metric)
            if metric.label is None:
                family.add_metric((self._job.run,), values[metric.name])
            else:
                for kind in get_args(Kind):  # from 0 on, so that an increase shows the first event
                    family.add_metric((self._job.run, kind), counts.get(kind, 0))
            yield family

    def _read(self) -> Mapping[str, float]:
        job, train = self._job, self._job.recipe.train
        if self._steps.read():
            self._last_step_time = self._now()  # workers' clocks may differ from this one
        self._counts.update(event["event"] for event in self._events.read())
        checkpoint_step, checkpoint_time = _find_checkpoint(job)
        return {
            "max_steps": train.max_steps,
            "start_time_seconds": self._start_time,
            "last_step_time_seconds": self._last_step_time,
            "checkpoint_interval_steps": job.recipe.checkpoint.interval_steps,
            "checkpoint_step": checkpoint_step,
            "checkpoint_time_seconds": checkpoint_time,
            "heartbeat_age_seconds": self._measure_heartbeats(),
        }

    def _measure_heartbeats(self) -> float:
        """Return the age of the oldest heartbeat, counted from the scrape that first saw it: clocks of nodes differ."""
        now = self._now()
        try:
            times = heartbeat_times(self._job.run_folder)
        except OSError:
            return math.nan
        seen = {name: self._heartbeats.get(name, (0, now)) for name in times}
        self._heartbeats = {name: seen[name] if seen[name][0] == time else (time, now) for name, time in times.items()}
        return max((now - since for _, since in self._heartbeats.values()), default=math.nan)


def _make_family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    labels = ("run", metric.label) if metric.label else ("run",)
    kind = CounterMetricFamily if metric.name.endswith(COUNTER_SUFFIX) else GaugeMetricFamily
    return kind(PREFIX + metric.name, metric.description, labels=labels)


def _find_checkpoint(job: Job) -> tuple[float, float]:
    """Return the step of the newest committed checkpoint and the time of its commit; 0 and NaN before the first."""
    try:
        step = newest_step(job.checkpoint_collection)
        if step is None:
            return 0.0, math.nan
        return step, (job.checkpoint_collection / checkpoint_id(step) / MANIFEST).stat().st_mtime
    except (MillraceError, OSError):
        return math.nan, math.nan
