"""Asks an image registry for the digest behind a tag, and for an image's labels (OCI Distribution Specification 1.1,
"Pulling manifests")."""

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
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path

from services.common.errors import DeviceError

MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
TIMEOUT_SECONDS = 30
DOCKER_HUB = "registry-1.docker.io"
DOCKER_HUB_LOGIN = "https://index.docker.io/v1/"  # under which `docker login` keeps it


@dataclass(frozen=True)
class Held:
    """What a registry has under a name."""

    digest: str
    """Of the manifest, or of the index of several platforms."""
    configuration: str
    """Digest of the image's configuration, which Docker calls the image's id; empty for an index."""


class NotHeld(DeviceError):
    """The registry has no such image."""


def resolve_digest(image: str) -> str:
    """The digest that `image` (`[registry/]name:tag`) has now. Raises `DeviceError` when the registry does not say."""
    headers, _ = _ask(image, "manifests", split_name(image)[2], "HEAD")
    digest = headers.get("Docker-Content-Digest", "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise _refusal(image, "its registry answered without a digest")
    return digest


def find_image(image: str) -> Held | None:
    """What the registry has under this tag; None when it has no such tag or repository.

    Raises `DeviceError` when it does not say.
    """
    try:
        headers, body = _ask(image, "manifests", split_name(image)[2], "GET")
    except NotHeld:
        return None
    digest = headers.get("Docker-Content-Digest") or f"sha256:{hashlib.sha256(body).hexdigest()}"
    return Held(digest, str(json.loads(body).get("config", {}).get("digest", "")))


def read_labels(image: str) -> dict[str, str]:
    """The labels of `image` (by tag or digest) for linux/amd64. Raises `DeviceError` when the registry does not say."""
    reference = split_name(image)[2]
    try:
        manifest = json.loads(_ask(image, "manifests", reference, "GET")[1])
        if "manifests" in manifest:
            wanted = {"os": "linux", "architecture": "amd64"}
            fits = [each for each in manifest["manifests"] if wanted.items() <= each.get("platform", {}).items()]
            manifest = json.loads(_ask(image, "manifests", fits[0]["digest"], "GET")[1])
        configuration = json.loads(_ask(image, "blobs", manifest["config"]["digest"], "GET")[1])
    except (ValueError, KeyError, IndexError) as error:
        raise _refusal(image, f"its registry has no image for linux/amd64 under that name: {error!r}") from error
    return dict(configuration.get("config", {}).get("Labels") or {})


def find_labels(image: str) -> dict[str, str]:
    """The labels of `image`; none where the registry does not tell them to this machine: a node may reach one that this
    machine does not."""
    try:
        return read_labels(image)
    except DeviceError:
        return {}


def split_name(image: str) -> tuple[str, str, str]:
    """Registry host, repository, and tag or digest, with Docker's defaults for what is left out."""
    path, at, tag = image.rpartition("@")
    if not at:
        path, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
    host, _, rest = path.partition("/")
    if rest and ("." in host or ":" in host or host == "localhost"):
        return host, rest, tag
    return DOCKER_HUB, path if "/" in path else f"library/{path}", tag


def _ask(image: str, what: str, reference: str, method: str) -> tuple[Message, bytes]:
    """Headers and body of a manifest or a blob, with a token where the registry wants one.

    Raises `NotHeld` where there is none, `DeviceError` when the registry does not say.
    """
    registry, name, _ = split_name(image)
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{name}/{what}/{reference}"
    login = _login(registry)
    try:
        try:
            return _request(url, method, login)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not challenge.lower().startswith("bearer "):
                raise
            return _request(url, method, f"Bearer {_token(challenge, login)}")
    except urllib.error.HTTPError as error:
        refusal = _refusal(image, f"{registry} answered {error.code} {error.reason}")
        raise (NotHeld(str(refusal)) if error.code == 404 else refusal) from error
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise _refusal(image, f"{registry}: {error}") from error


def _login(registry: str) -> str:
    """What `docker login` left for this registry (Amazon's ECR wants it): an Authorization header, or nothing."""
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


def _request(url: str, method: str, authorization: str) -> tuple[Message, bytes]:
    headers = {"Accept": ", ".join(MANIFEST_TYPES)} | ({"Authorization": authorization} if authorization else {})
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return answer.headers, answer.read()


def _token(challenge: str, login: str) -> str:
    """For whoever has logged in, else for anybody."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    headers = {"Authorization": login} if login else {}
    request = urllib.request.Request(f"{fields['realm']}?{query}", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        body = json.load(answer)
    return str(body.get("token") or body["access_token"])


def _refusal(image: str, reason: str) -> DeviceError:
    return DeviceError(
        f"nothing known of {image}: {reason}. Check the name and the tag, and run this where that registry is reached "
        f"and you are logged in. Nothing was changed."
    )
