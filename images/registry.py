"""Asks an image registry for the digest behind a tag (OCI Distribution Specification 1.1, "Pulling manifests")."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException

from services.common.errors import DeviceError

MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
TIMEOUT_SECONDS = 30


def resolve_digest(image: str) -> str:
    """The digest that `image` (`[registry/]name:tag`) has now. Raises `DeviceError` when the registry does not say."""
    registry, name, tag = split_name(image)
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{name}/manifests/{tag}"
    try:
        digest = _head(url, token="")
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise _refusal(image, f"{registry} answered {error.code} {error.reason}") from error
        try:
            digest = _head(url, _anonymous_token(challenge))
        except (OSError, HTTPException, ValueError, KeyError) as refused:
            raise _refusal(image, f"{registry}: {refused}") from refused
    except (OSError, HTTPException) as error:
        raise _refusal(image, f"{registry}: {error}") from error
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise _refusal(image, f"{registry} answered without a digest")
    return digest


def split_name(image: str) -> tuple[str, str, str]:
    """Registry host, repository and tag, with Docker's defaults for what is left out."""
    path, _, tag = image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "latest")
    host, _, rest = path.partition("/")
    if rest and ("." in host or ":" in host or host == "localhost"):
        return host, rest, tag
    return "registry-1.docker.io", path if "/" in path else f"library/{path}", tag


def _head(url: str, token: str) -> str:
    headers = {"Accept": ", ".join(MANIFEST_TYPES)} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, method="HEAD", headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return str(answer.headers.get("Docker-Content-Digest", ""))


def _anonymous_token(challenge: str) -> str:
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    with urllib.request.urlopen(f"{fields['realm']}?{query}", timeout=TIMEOUT_SECONDS) as answer:
        body = json.load(answer)
    return str(body.get("token") or body["access_token"])


def _refusal(image: str, reason: str) -> DeviceError:
    return DeviceError(
        f"no digest for {image}: {reason}. Run `make pin` where that registry is reached, and check the name and the "
        f"tag in images/platforms.toml. Nothing was changed."
    )
