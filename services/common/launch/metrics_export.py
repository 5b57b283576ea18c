"""Exports the metrics of a command to scrapers of a port, and through Ray where the command runs on Ray."""

from __future__ import annotations

import logging
import math
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from services.common.process.background_thread import running_in_background

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

RAY_SECONDS = 5.0
"""Seconds between two updates of the gauges that Ray exports; Ray sends them every ten seconds."""
END_SECONDS = 10.0
"""Seconds for which the end of a command waits for an update, which may hang with its file system."""


@contextmanager
def export_metrics(collectors: Sequence[Collector], arguments: Namespace) -> Iterator[None]:
    """Export metrics, the stage's progress and the space of its file system during the block.

    `--metrics-port` and `--metrics-host` open a port for scrapers. Under `--launch ray`, Ray's metrics agents serve
    the metrics, too, with the prefix `ray_`. Raises `RecipeError` if the port cannot be opened.
    """
    if arguments.metrics_port is None and arguments.launch != "ray":
        yield
        return
    # A command without a reader of its metrics starts 0.03 s earlier without these imports.
    from services.common.process.metrics_server import serve_metrics  # noqa: PLC0415
    from services.common.process.stage_metrics import StageMetrics  # noqa: PLC0415

    collectors = (StageMetrics(arguments.root), *collectors)
    with serve_metrics(collectors, arguments.metrics_host, arguments.metrics_port):
        if arguments.launch != "ray":
            yield
            return
        with running_in_background(partial(_export_to_ray, collectors), "ray metrics", END_SECONDS):
            yield


def _export_to_ray(collectors: Sequence[Collector], is_over: threading.Event) -> None:
    from services.common.launch.ray_launcher import RayGauges  # noqa: PLC0415 - inline commands do without Ray

    gauges = RayGauges()
    while not is_over.wait(RAY_SECONDS):
        try:
            for collector in collectors:
                for family in collector.collect():
                    for sample in family.samples:
                        if not math.isnan(sample.value):
                            gauges.set(sample.name, family.documentation, sample.labels, sample.value)
        except Exception:  # an export that fails never ends the run
            logger.warning("metrics are no longer exported to Ray", exc_info=True)
            return
