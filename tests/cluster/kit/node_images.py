"""Images in the node: copied from the local Docker engine, known by name and by digest."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from typing import Any

from images.registry import repository_of
from k8s.client.stage_image import full_name
from services.common.errors import DeviceError
from tests.cluster.kit.processes import SOCKET, run
from tests.containers import inspect_image


def load(*images: str) -> None:
    """Copy images from the local Docker engine into the node, each under its name and as NAME@sha256:DIGEST.

    One that is there already is not copied again.
    """
    ids = {image: inspect_image(image)["Id"] for image in images}
    there = references()
    copy([image for image, id in ids.items() if id not in there])
    now = references()
    for image, id in ids.items():
        source = id if id in there else full_name(image)
        give_names(source, [full_name(image), f"{repository_of(full_name(image))}@{now[source]}"])
    drop_layers({references()[full_name(image)] for image in images})


def copy(images: list[str]) -> None:
    """Copy all images in one stream, so that shared layers travel once."""
    if not images:
        return
    saved = subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE)
    try:
        ctr("images", "import", "-", stdin=saved.stdout)
    finally:
        assert saved.stdout
        saved.stdout.close()  # else a `docker save` that nobody reads from never ends
        saved.wait()
    if saved.returncode:
        raise DeviceError(f"docker could not save {' '.join(images)}: its message is above.")


def references() -> dict[str, str]:
    """Every name of an image in the node, and the digest of its manifest. One name is Docker's image id."""
    if not SOCKET.is_socket():
        raise DeviceError("no node is up: `make cluster-local` starts one.")
    rows = [line.split() for line in ctr("images", "ls").splitlines()[1:]]
    return {row[0]: row[2] for row in rows}


def give_names(source: str, names: Iterable[str]) -> None:
    """`--force` moves a name that another image has."""
    known = references()
    for name in names:
        if known.get(name) != known[source]:
            ctr("images", "tag", "--force", source, name)


def drop_layers(digests: Iterable[str]) -> None:
    """Containers run from unpacked snapshots: the archives of the layers that were unpacked are dead weight."""
    blobs = set(ctr("content", "ls", "-q").split())
    manifests = [json.loads(ctr("content", "get", digest)) for digest in digests]
    layers = {layer["digest"] for manifest in manifests for layer in manifest.get("layers", [])} & blobs
    if layers:
        ctr("content", "rm", *sorted(layers))


def ctr(*arguments: str, **kwargs: Any) -> str:
    return run("ctr", "-a", SOCKET, "-n", "k8s.io", *arguments, **kwargs)
