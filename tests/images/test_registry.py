"""Digests and labels come from the registry that is asked, or there are none."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.pins import pin_base_images
from images.platforms import PLATFORMS, read_digests
from images.registry import is_held
from services.common.errors import DeviceError

CONFIGURATION = json.dumps({"architecture": "amd64", "os": "linux", "config": {}}).encode()
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest_of(CONFIGURATION),
            "size": len(CONFIGURATION),
        },
        "layers": [],
    }
).encode()
CONTENTS = {
    "/v2/": b"{}",
    "/v2/neuron/base/manifests/known": MANIFEST,
    f"/v2/neuron/base/blobs/{digest_of(CONFIGURATION)}": CONFIGURATION,
}
UNKNOWN = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'


class Registry(BaseHTTPRequestHandler):
    """Has one image, `neuron/base:known`."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in CONTENTS else 404)
        self.send_header("Content-Type", MANIFEST_TYPE if self.path in CONTENTS else "application/json")
        self.end_headers()
        self.wfile.write(CONTENTS.get(self.path, UNKNOWN))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    if shutil.which("skopeo") is None:
        pytest.skip("no skopeo on PATH: apt-get install skopeo")
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
    pin_base_images(path)
    assert read_digests(path) == {base: digest_of(MANIFEST)}


@pytest.mark.parametrize("base", ["{registry}/neuron/base:unknown", "127.0.0.1:1/neuron/base:known"])
def test_a_registry_that_does_not_know_changes_nothing(registry: str, tmp_path: Path, base: str) -> None:
    path = platforms_with(base.format(registry=registry), tmp_path / "platforms.toml")
    before = path.read_bytes()
    with pytest.raises(DeviceError, match=base.format(registry=registry)):
        pin_base_images(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_image_is_absent_only_where_its_registry_says_so(registry: str) -> None:
    """A push leaves out a tag that is there, and must not take a registry that does not answer for an empty one."""
    assert is_held(f"{registry}/neuron/base:known")
    assert not is_held(f"{registry}/neuron/base:unknown")
    with pytest.raises(DeviceError):
        is_held("127.0.0.1:1/neuron/base:known")
