"""Reads the digest and the labels of an image from its registry.

The protocol is that of the OCI Distribution Specification 1.1, section "Pulling manifests".
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from services.common.errors import DeviceError

MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
TIMEOUT_SECONDS = 30
DOCKER_HUB = "registry-1.docker.io"
DOCKER_HUB_LOGIN = "https://index.docker.io/v1/"  # the name that `docker login` gives to Docker Hub


class NotHeld(DeviceError):
    """The registry answered that it has no such image."""


def resolve_digest(image: str) -> str:
    """The digest of `image` (`[registry/]name:tag`). Raises `DeviceError` when its registry does not give it."""
    return _read_manifest(image, split_name(image)[2])[0]


def is_held(image: str) -> bool:
    """Return whether the registry has an image of this name.

    Raises `DeviceError` when the registry is not reached or refuses to answer.
    """
    try:
        resolve_digest(image)
    except NotHeld:
        return False
    return True


def read_labels(image: str) -> dict[str, str]:
    """The labels of `image` for linux/amd64. Raises `DeviceError` when its registry does not give them."""
    _, manifest = _read_manifest(image, split_name(image)[2])
    try:
        if "manifests" in manifest:
            wanted = {"os": "linux", "architecture": "amd64"}
            fits = [each for each in manifest["manifests"] if wanted.items() <= each.get("platform", {}).items()]
            _, manifest = _read_manifest(image, fits[0]["digest"])
        configuration = json.loads(_ask(image, "blobs", manifest["config"]["digest"]))
    except (ValueError, KeyError, IndexError) as error:
        raise _unknown(image, f"its registry has no image for linux/amd64 under that name: {error!r}") from error
    return dict(configuration.get("config", {}).get("Labels") or {})


def find_labels(image: str) -> dict[str, str]:
    """Return the labels of `image`; none if this machine cannot read them: a registry may serve only the nodes."""
    try:
        return read_labels(image)
    except DeviceError:
        return {}


def repository_of(image: str) -> str:
    """An image's name without its tag and digest. A port, which is before the first slash, stays."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]


def split_name(image: str) -> tuple[str, str, str]:
    """Registry, repository, and tag or digest of an image's name, with Docker's defaults for missing parts."""
    path, at, tag = image.rpartition("@")
    if not at:
        path, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
    host, _, rest = path.partition("/")
    if rest and ("." in host or ":" in host or host == "localhost"):
        return host, rest, tag
    return DOCKER_HUB, path if "/" in path else f"library/{path}", tag


def _read_manifest(image: str, reference: str) -> tuple[str, dict[str, Any]]:
    """Digest and content of a manifest. Raises as `_ask`, and `DeviceError` for an answer that is not a manifest."""
    answer = _ask(image, "manifests", reference)
    try:
        manifest = json.loads(answer)
        if manifest["schemaVersion"] != 2:
            raise ValueError(f"its schemaVersion is {manifest['schemaVersion']}, expected 2")
    except (ValueError, KeyError, TypeError) as error:
        raise _unknown(image, f"its registry's answer is not a manifest: {error!r}") from error
    return f"sha256:{hashlib.sha256(answer).hexdigest()}", manifest


def _ask(image: str, what: str, reference: str) -> bytes:
    """The content of a manifest or a blob; gets a token first if the registry asks for one.

    Raises `NotHeld` when the registry has none, `DeviceError` when it is not reached or refuses to answer.
    """
    registry, name, _ = split_name(image)
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{name}/{what}/{reference}"
    login = _login(registry)
    try:
        try:
            return _request(url, login)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not challenge.lower().startswith("bearer "):
                raise
            return _request(url, f"Bearer {_token(challenge, login)}")
    except urllib.error.HTTPError as error:
        unknown = _unknown(image, f"{registry} answered {error.code} {error.reason}")
        raise (NotHeld(str(unknown)) if error.code == 404 else unknown) from error
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise _unknown(image, f"{registry}: {error}") from error


def _login(registry: str) -> str:
    """The Authorization header from `docker login` to this registry, which Amazon ECR needs; empty without a login."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    registry = DOCKER_HUB_LOGIN if registry == DOCKER_HUB else registry
    kept = (configuration.get("auths") or {}).get(registry, {}).get("auth")
    store = (configuration.get("credHelpers") or {}).get(registry) or configuration.get("credsStore")
    if not kept and store:
        command = [f"docker-credential-{store}", "get"]
        try:
            done = subprocess.run(command, input=registry, capture_output=True, text=True, check=True)
            answer = json.loads(done.stdout)
        except (OSError, subprocess.CalledProcessError, ValueError):
            return ""
        kept = base64.b64encode(f"{answer['Username']}:{answer['Secret']}".encode()).decode()
    return f"Basic {kept}" if kept else ""


def _request(url: str, authorization: str, accept: str = ", ".join(MANIFEST_TYPES)) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept})
    if authorization:
        # Amazon ECR redirects blobs to signed addresses of S3, which refuses a second authorization.
        request.add_unredirected_header("Authorization", authorization)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # nosec B310 # https, or this machine
        return bytes(answer.read())


def _token(challenge: str, login: str) -> str:
    """Get the token that the registry's challenge asks for: the user's after `docker login`, else an anonymous one."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    body = json.loads(_request(f"{fields['realm']}?{query}", login, "application/json"))
    return str(body.get("token") or body["access_token"])


def _unknown(image: str, reason: str) -> DeviceError:
    return DeviceError(
        f"{image} could not be looked up in its registry: {reason}. Nothing was changed. Check the name and the tag, "
        f"and run this on a machine that reaches the registry, after `docker login`."
    )
