"""Digests and labels come from the registry that is asked, or there are none."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images.pin import pin
from images.platforms import PLATFORMS, read_digests
from images.registry import read_labels
from services.common.errors import DeviceError

MANIFEST = b'{"schemaVersion": 2, "config": {"digest": "sha256:5"}}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
LABELS = {"millrace.service": "trainer"}


class Registry(BaseHTTPRequestHandler):
    """Answers as Amazon ECR does: a token first, then the manifest of its one tag; blobs are elsewhere."""

    def do_GET(self) -> None:
        address = f"http://{self.headers['Host']}"
        authorization = self.headers.get("Authorization")
        if self.path.startswith("/token"):
            self._answer(200 if "scope=repository%3Aa%3Apull" in self.path else 400, b'{"token": "anonymous"}')
        elif self.path == "/signed":
            # Amazon S3 refuses an address that is signed when a header authorizes the request, too.
            configuration = json.dumps({"config": {"Labels": LABELS}}).encode()
            self._answer(400 if authorization else 200, configuration)
        elif authorization != "Bearer anonymous":
            challenge = f'Bearer realm="{address}/token",service="here",scope="repository:a:pull"'
            self._answer(401, header=("WWW-Authenticate", challenge))
        elif self.path.endswith("/blobs/sha256:5"):
            self._answer(307, header=("Location", f"{address}/signed"))
        else:
            known = {"known": MANIFEST, "page": b"<html>Log in</html>"}.get(self.path.rpartition("/")[2])
            self._answer(404 if known is None else 200, known or b"")

    def _answer(self, code: int, body: bytes = b"", header: tuple[str, str] = ("Content-Type", "any")) -> None:
        self.send_response(code)
        self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def platforms_with(base: str, path: Path) -> Path:
    text = PLATFORMS.read_text(encoding="utf-8").partition("[digests]")[0]
    lines = [
        f'{line.partition("=")[0]}= "{base}"' if line.startswith(("slim =", "platform =")) else line
        for line in text.splitlines()
    ]
    path.write_text("\n".join([*lines, "[digests]", '"old" = "sha256:old"', ""]), encoding="utf-8")
    return path


def test_pin_writes_the_digest_that_the_registry_gives(registry: str, tmp_path: Path) -> None:
    base = f"{registry}/neuron/base:known"
    path = platforms_with(base, tmp_path / "platforms.toml")
    assert pin(path) == {base: DIGEST}
    assert read_digests(path) == {base: DIGEST}


@pytest.mark.parametrize("base", ["{registry}/neuron/base:unknown", "127.0.0.1:1/neuron/base:known"])
def test_a_registry_that_does_not_know_changes_nothing(registry: str, tmp_path: Path, base: str) -> None:
    path = platforms_with(base.format(registry=registry), tmp_path / "platforms.toml")
    before = path.read_bytes()
    with pytest.raises(DeviceError, match=base.format(registry=registry)):
        pin(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_labels_are_read_where_blobs_are_redirected_to_a_signed_address(registry: str) -> None:
    assert read_labels(f"{registry}/neuron/base:known") == LABELS
