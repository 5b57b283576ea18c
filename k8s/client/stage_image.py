"""The image that a deployment or a one-off runs.

TAG names it, or the working tree builds it; the client finds its digest.
"""

from __future__ import annotations

import re

from images.registry import find_labels, resolve_digest
from images.versions import describe_build
from k8s.objects.api import Api, Object
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError


def choose_image(api: Api, service: str, variant: str, container: Object, tag: str) -> str:
    """Full name of the image for a container of the RayCluster, by digest where the registry or a node tells one.

    `tag` may be empty (the working tree's), a tag, a digest, or a whole image name. Raises `DeviceError` when it is
    nowhere to be had.
    """
    image = _named(repository_of(container["image"]), tag or describe_build(service, variant).commit_tag)
    if "@sha256:" in image:
        return image
    if container.get("imagePullPolicy") == "Never":
        return _on_nodes(api, service, variant, image)
    return f"{repository_of(image)}@{resolve_digest(image)}"


def find_image_labels(group: WorkerGroup, image: str) -> dict[str, str]:
    """The labels of a stage's image; none of one that is brought to the nodes, or that this machine cannot look up."""
    return {} if group.is_image_on_nodes else find_labels(image)


def read_platform_labels(group: WorkerGroup, image: str) -> dict[str, str]:
    """Variant, Python and Ray of an image in a registry, from its labels; nothing where there are none.

    What cannot be read here the image tells itself.
    """
    labels = find_image_labels(group, image)
    platform = {what: labels.get(f"millrace.{what}", "") for what in ("variant", "python", "ray")}
    return platform if all(platform.values()) else {}


def _named(repository: str, tag: str) -> str:
    if "/" in tag:
        return tag
    if re.fullmatch(r"sha256:[0-9a-f]{64}", tag):
        return f"{repository}@{tag}"
    return f"{repository}:{tag}"


def _on_nodes(api: Api, service: str, variant: str, image: str) -> str:
    """An image that is never pulled must be on a node already; its kubelet lists the digest beside the tag."""
    repository = full_name(repository_of(image))
    held = [listed.get("names") or [] for node in api.find_all("Node") for listed in node["status"].get("images") or []]
    for names in held:
        if full_name(image) in map(full_name, names):
            digests = [name for name in names if full_name(name).startswith(f"{repository}@sha256:")]
            return digests[0] if digests else image
    tags = sorted({name for names in held for name in names if full_name(name).startswith(f"{repository}:")})
    raise DeviceError(
        f"no node has the image {image}, and it is never pulled (imagePullPolicy: Never). The nodes have "
        f"{', '.join(tags) or f'none of {repository}'}. Build it (make images STAGE={service} VARIANT={variant}) and "
        f"bring it there (make load-images STAGE={service}, or kind load docker-image), or name another with TAG=."
    )


def full_name(image: str) -> str:
    """As Kubernetes looks it up: docker.io/millrace/head:1 for millrace/head:1."""
    domain, slash, _ = image.partition("/")
    if slash and ("." in domain or ":" in domain or domain == "localhost"):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def repository_of(image: str) -> str:
    path = image.partition("@")[0]
    folder, slash, last = path.rpartition("/")
    return folder + slash + last.partition(":")[0]
