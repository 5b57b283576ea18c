"""Runs a registry on loopback: Debian's docker-registry, and a proxy with immutable tags like Amazon's ECR."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images.docker import docker
from services.common.testing.waiting import wait_until

PROGRAM = "docker-registry"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


@contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Run a registry with its storage in `folder`, and yield its address; Docker's tags for it are removed at the end.

    Skips the test where docker-registry is not installed.
    """
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"no {PROGRAM} on PATH: apt-get install {PROGRAM}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    settings = folder / "registry.yml"
    storage = {"filesystem": {"rootdirectory": str(folder / "registry")}}
    settings.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": address}}), encoding="utf-8")
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(settings)], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: _answers(address), 60)
        yield address
    finally:
        process.terminate()
        process.wait(30)
        names = docker("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()
        for name in names:
            if name.startswith(f"{address}/"):
                docker("rmi", "--no-prune", name)


def _answers(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", "/v2/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class ImmutableTags(ThreadingHTTPServer):
    """Proxy of a registry that refuses to replace a tag, like ECR."""

    def __init__(self, registry: str) -> None:
        super().__init__(("127.0.0.1", 0), _Front)
        self.registry = registry
        self.address = f"127.0.0.1:{self.server_port}"
        self.pushed: list[str] = []
        """Paths of the manifests that were written."""


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ImmutableTags

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        if "/manifests/" in self.path and self._ask("HEAD", b"")[0] == 200:
            repository, _, tag = self.path.removeprefix("/v2/").partition("/manifests/")
            message = (
                f"The image tag '{tag}' already exists in the '{repository}' repository and cannot be overwritten "
                f"because the tag is immutable."
            )
            body = {"errors": [{"code": "TAG_INVALID", "message": message}]}
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(400, json.dumps(body).encode())
            return
        if "/manifests/" in self.path:
            self.server.pushed.append(self.path)
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_PATCH(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        status, headers, body = self._ask(self.command, self._read_body())
        self._answer(status, body, headers)

    def _ask(self, method: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.registry, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Content-Length"] = str(len(body))
        connection.request(method, self.path, body, headers)
        answer = connection.getresponse()
        read = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
        connection.close()
        return answer.status, kept, read

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def immutable_tags(registry: str) -> Iterator[ImmutableTags]:
    with ImmutableTags(registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
