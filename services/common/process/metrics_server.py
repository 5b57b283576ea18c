"""Serves a command's metrics over HTTP for Prometheus, while the command runs."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from services.common.errors import RecipeError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

PREFIX = "millrace_"
"""Begin of the name of every metric."""
MAX_PORT = 65535
CLIENT_SECONDS = 30.0
"""Seconds after which a client that neither sends nor reads is disconnected."""
MAX_CLIENTS = 32
"""Connections at one time; further ones are closed, so that clients never take the descriptors that the run needs."""


@contextmanager
def serve_metrics(collectors: Iterable[Collector], host: str, port: int | None) -> Iterator[None]:
    """Serve `/metrics` during the block; without a port do nothing. Port 0 lets the system choose one.

    Raises `RecipeError` if the server cannot listen on the port.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        server = make_server(host, port, _answer_in_text(registry), _Server, handler_class=_Handler)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the last two for a host that is no name
        raise RecipeError(
            f"--metrics-port {port}: cannot listen on {host}: {error}. Pass a free port from 0 to {MAX_PORT}, and an "
            f"address of this machine as --metrics-host."
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


def _answer_in_text(registry: CollectorRegistry) -> WSGIApplication:
    """Return an application that answers in Prometheus' text format, which every scraper reads.

    The library would choose a format by the request's Accept header, and fails on a version that is not a number.
    """
    application = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        return application(environ, start_response)

    return answer


class _Server(ThreadingWSGIServer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; close a connection above MAX_CLIENTS."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let the next client in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log an error of a scrape. A client that resets its connection is not worth a warning."""
        error = sys.exception()
        if isinstance(error, OSError):
            logger.debug("%s left before it had its answer: %s", client_address, error)
        else:
            logger.error("a scrape from %s could not be answered", client_address, exc_info=error)


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no scrapes."""
