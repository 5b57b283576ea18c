"""Exports the metrics of a command to scrapers of a port, and through Ray where the command runs on Ray."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
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
def export_metrics(
    collectors: Sequence[Collector], root: Path, launch: str, port: int | None, host: str
) -> Iterator[None]:
    """Export metrics, the stage's progress and the space of the root's file system during the block.

    A `port` is opened for scrapers; 0 lets the system choose one. Under the launcher `ray`, Ray's metrics agents serve
    the metrics, too, with the prefix `ray_`. Raises `RecipeError` if the port cannot be opened.
    """
    if port is None and launch != "ray":
        yield
        return
    # A command without a reader of its metrics starts 0.03 s earlier without these imports.
    from services.common.process.stage_metrics import StageMetrics, serve_metrics  # noqa: PLC0415

    collectors = (StageMetrics(root), *collectors)
    with ExitStack() as opened:
        if port is not None:
            opened.enter_context(serve_metrics(collectors, host, port))
        if launch == "ray":
            export = partial(_export_to_ray, collectors)
            opened.enter_context(running_in_background(export, "ray metrics", END_SECONDS))
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
