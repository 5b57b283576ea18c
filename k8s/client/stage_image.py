"""Chooses the image of a deployment or a one-off: the one that TAG names, or this checkout's, by its digest."""

from __future__ import annotations

import re

from images.registry import repository_of, resolve_digest
from images.versions import describe_build
from k8s.objects.api import Api, Object
from services.common.errors import DeviceError


def choose_image(api: Api, service: str, variant: str, container: Object, tag: str) -> str:
    """Full name of the image for a container of the RayCluster, by digest where the registry or a node has one.

    `tag` may be empty (this checkout's image), a tag, a digest, or a whole image name. Raises `DeviceError` for an
    image that neither the registry nor a node has.
    """
    image = _named(repository_of(container["image"]), tag or describe_build(service, variant).commit_tag)
    if "@sha256:" in image:
        return image
    if container.get("imagePullPolicy") == "Never":
        return _on_nodes(api, service, variant, image)
    return f"{repository_of(image)}@{resolve_digest(image)}"


def _named(repository: str, tag: str) -> str:
    if "/" in tag:
        return tag
    if re.fullmatch(r"sha256:[0-9a-f]{64}", tag):
        return f"{repository}@{tag}"
    return f"{repository}:{tag}"


def _on_nodes(api: Api, service: str, variant: str, image: str) -> str:
    """The image on a node, by the digest that kubelet lists beside the tag: an image that is never pulled."""
    repository = full_name(repository_of(image))
    held = [listed.get("names") or [] for node in api.find_all("Node") for listed in node["status"].get("images") or []]
    for names in held:
        if full_name(image) in map(full_name, names):
            digests = [name for name in names if full_name(name).startswith(f"{repository}@sha256:")]
            return digests[0] if digests else image
    tags = sorted({name for names in held for name in names if full_name(name).startswith(f"{repository}:")})
    raise DeviceError(
        f"no node has the image {image}, which is never pulled (imagePullPolicy: Never). The nodes have "
        f"{', '.join(tags) or f'none of {repository}'}. Build it (make images STAGE={service} VARIANT={variant}) and "
        f"load it (LOAD=1, or kind load docker-image), or name another with TAG=."
    )


def full_name(image: str) -> str:
    """The name with which Kubernetes looks an image up, such as docker.io/millrace/head:1 for millrace/head:1."""
    domain, slash, _ = image.partition("/")
    if slash and ("." in domain or ":" in domain or domain == "localhost"):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"
