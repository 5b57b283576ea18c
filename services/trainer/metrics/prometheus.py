"""The newest metrics of a run over HTTP, in Prometheus's text format (exposition format 0.0.4).

The command serves them, from metrics.jsonl: no step waits for a scrape, and a restart of the workers ends no scrape.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from services.common.errors import RecipeError
from services.trainer.metrics.metric_table import METRICS, PREFIX
from services.trainer.metrics.records import MetricsTail, known_metrics

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PORT = 65535
CLIENT_SECONDS = 30.0
"""A client that neither sends nor takes a byte for so long is hung up on."""


class NewestMetrics:
    """Of each metric the newest value that a run's records from now on have; NaN until there is one."""

    def __init__(self, run_folder: Path) -> None:
        self._tail = MetricsTail(run_folder)
        self._lock = threading.Lock()  # scrapes may overlap
        self._values = {metric.name: math.nan for metric in METRICS}

    def read(self) -> dict[str, float]:
        with self._lock:
            for record in self._tail.read():
                self._values |= known_metrics(record)
            return dict(self._values)


@contextmanager
def serve_metrics(run_folder: Path, run: str, host: str, port: int | None) -> Iterator[None]:
    """Serve `/metrics` while the context lasts; do nothing without a port. Port 0 is one that the system chooses.

    Raises `RecipeError` where the port cannot be had.
    """
    if port is None:
        yield
        return
    handler = partial(_Handler, NewestMetrics(run_folder), run)
    try:
        server = _Server((host, port), handler)
    except (OSError, OverflowError) as error:
        raise RecipeError(
            f"--metrics-port {port}: cannot listen on {host}: {error}. Pass a port from 0 to {MAX_PORT} that is free, "
            f"and as --metrics-host an address of this machine."
        ) from error
    with server:
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        print(f"metrics are at http://{host}:{server.server_port}/metrics", flush=True)
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def format_metrics(values: Mapping[str, float], run: str) -> str:
    """Every metric of METRICS with its HELP and TYPE."""
    lines = []
    for metric in METRICS:
        name, value = PREFIX + metric.name, values[metric.name]
        shown = repr(value).replace("inf", "Inf").replace("nan", "NaN")
        lines += [
            f"# HELP {name} {metric.help} ({metric.unit}; {metric.reduction})",
            f"# TYPE {name} gauge",
            f'{name}{{run="{run}"}} {shown}',
        ]
    return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that resets or leaves its connection is no event of the run; any other error is a bug of ours."""
        error = sys.exception()
        if isinstance(error, OSError):
            logger.debug("%s left while it was answered: %s", client_address, error)
        else:
            logger.error("a scrape from %s could not be answered", client_address, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS

    def __init__(self, newest: NewestMetrics, run: str, *arguments: object) -> None:
        self._newest, self._run = newest, run
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = format_metrics(self._newest.read(), self._run).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """A scrape is no event of the run."""
