"""Receives notices in tests as Slack does: an HTTP server on loopback whose behaviour a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0SECRET/B0SECRET/x0secretx0secretx0secretx0"


class Receiver:
    """The requests that a webhook's receiver got, and its answer to the next one."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """Bodies of all requests, those with a failing answer included."""
        self.keys: list[str] = []
        """The `Idempotency-Key` of each request."""
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda handler: say(handler, 200)
        self.is_over = threading.Event()
        """Whether the test is over, so that answers that never come may end."""
        self.url = ""

    @property
    def titles(self) -> list[str]:
        """First line of each notice: its subject and condition."""
        return [body["text"].splitlines()[0] for body in self.bodies]


def say(handler: BaseHTTPRequestHandler, status: int, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on loopback; its URL has a path that is a password, as Slack's."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            receiver.keys.append(self.headers["Idempotency-Key"])
            receiver.answer(self)

        def do_GET(self) -> None:
            receiver.bodies.append({"text": f"GET {self.path}"})

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_port}/services/{SECRET}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.is_over.set()
            server.shutdown()
            thread.join()
