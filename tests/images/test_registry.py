"""Digests come from the registry that is asked, or there are none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from images.pin import pin, unpinned_bases
from images.platforms import PLATFORMS, read_digests
from images.registry import resolve_digest, split_name
from services.common.errors import DeviceError

DIGEST = "sha256:" + "5" * 64


class Registry(BaseHTTPRequestHandler):
    """Answers as registries do: an anonymous token first, then the digest of the one tag it has."""

    def do_HEAD(self) -> None:
        if self.headers.get("Authorization") != "Bearer anonymous":
            self.send_response(401)
            realm = f"http://{self.headers['Host']}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="here",scope="repository:a:pull"')
        elif self.path.endswith("/manifests/known"):
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        else:
            self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200 if "scope=repository%3Aa%3Apull" in self.path else 400)
        self.end_headers()
        self.wfile.write(b'{"token": "anonymous"}')

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
    assert unpinned_bases("trainer", path) == [base]
    assert pin(path) == {base: DIGEST}
    assert read_digests(path) == {base: DIGEST}
    assert unpinned_bases("trainer", path) == []


@pytest.mark.parametrize("base", ["{registry}/neuron/base:unknown", "127.0.0.1:1/neuron/base:known"])
def test_a_registry_that_does_not_know_changes_nothing(registry: str, tmp_path: Path, base: str) -> None:
    path = platforms_with(base.format(registry=registry), tmp_path / "platforms.toml")
    before = path.read_bytes()
    with pytest.raises(
        DeviceError,
        match=r"nothing known of 127\.0\.0\.1:\d+/neuron/base:.*Check the name and the tag.*Nothing was changed",
    ):
        pin(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_answer_without_a_digest_is_no_digest(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DIGEST", "latest")
    with pytest.raises(DeviceError, match="answered without a digest"):
        resolve_digest(f"{registry}/neuron/base:known")


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("python:3.12-slim", ("registry-1.docker.io", "library/python", "3.12-slim")),
        ("millrace/head", ("registry-1.docker.io", "millrace/head", "latest")),
        ("public.ecr.aws/neuron/base:2", ("public.ecr.aws", "neuron/base", "2")),
        ("localhost:5000/a/b:c", ("localhost:5000", "a/b", "c")),
        ("localhost:5000/a/b", ("localhost:5000", "a/b", "latest")),
    ],
)
def test_names_have_dockers_defaults(image: str, parts: tuple[str, str, str]) -> None:
    assert split_name(image) == parts
