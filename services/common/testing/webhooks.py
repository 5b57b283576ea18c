"""Receives notices in tests as Slack does: an HTTP server on loopback that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0SECRET/B0SECRET/x0secretx0secretx0secretx0"


class Receiver:
    """The requests that a webhook's receiver got."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """Texts of all requests, those with a failing answer included."""
        self.statuses: list[int] = []
        """Statuses of the next answers; 200 after the last."""
        self.url = ""

    @property
    def conditions(self) -> list[str]:
        """The conditions of the notices, in the order in which they came."""
        return [text.splitlines()[0].strip("*").rpartition(": ")[2] for text in self.texts]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on loopback; its URL has a path that is a password, as Slack's."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

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
            server.shutdown()
            thread.join()
