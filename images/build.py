"""Builds the images of one variant with `./pants package`, and pushes them with `./pants publish`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from images.docker import has_image
from images.platforms import (
    REPOSITORY,
    SERVICES,
    STAGES_WITH_PROGRAM,
    VARIANTS,
    CudaNode,
    NeuronNode,
    Platform,
    read_digests,
    read_platforms,
)
from images.registry import is_held, read_labels
from images.versions import Build, describe_build, is_released
from services.common.errors import DeviceError, RecipeError

CA_BUNDLE = REPOSITORY / "images/inputs/ca-bundle.crt"
# Variables that name a user's CA bundle, for this or other programs; the build uses the first that is set.
CA_VARIABLES = ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
BASE_LABEL = "org.opencontainers.image.base.name"
# The build argument that says which driver a node must have.
DRIVER_ARGUMENTS = {CudaNode: "NVIDIA_DRIVER", NeuronNode: "NEURON_DRIVER"}


def build_images(services: Sequence[str], variant: str) -> None:
    """Build the images of `services` with Pants. Raises `DeviceError` when it fails, as without a base image."""
    _run_pants("package", services, variant)


def publish_images(services: Sequence[str], variant: str, registry: str) -> None:
    """Build the images of `services`, and push them as `registry/millrace/<service>`; a tag is never replaced.

    Every image gets its commit's tag, and a release on the pinned base image its version's, too. A tag that the
    registry has already names an image of the same sources, and is left out.

    Raises `RecipeError` when sources are not committed, and `DeviceError` when the registry has an image of another
    base under a tag, or refuses a push.
    """
    require_committed(services, variant)
    names = {service: names_of(describe_build(service, variant), registry) for service in services}
    held = [name for each in names.values() for name in each if is_held(name)]
    for name in held:
        _require_same_base(name, variant)
        print(f"already there: {name}", flush=True)
    missing = [service for service in services if not set(names[service]) <= set(held)]
    if missing:
        _run_pants("publish", missing, variant, REGISTRY=registry, HELD_IMAGES=" ".join(held))


def _require_same_base(name: str, variant: str) -> None:
    """Raises `DeviceError` when the image in the registry stands on another base than this machine's would."""
    labels = read_labels(name)
    held, ours = labels.get(BASE_LABEL), base_of(labels["millrace.service"], choose_platform(variant))
    if held != ours:
        raise DeviceError(
            f"{name} is in the registry on the base {held}, and here it would stand on {ours}. A tag is never "
            f"replaced, so nothing was pushed: deploy it with TAG={name}, or commit a change, or push elsewhere."
        )


def _run_pants(goal: str, services: Sequence[str], variant: str, **variables: str) -> None:
    # pants.toml leaves out every variant but cpu.
    chosen = [] if variant == "cpu" else [f"--tag=['{variant}']"]
    targets = [f"images:{service}-{variant}" for service in services]
    done = subprocess.run(
        ["./pants", *chosen, goal, *targets], cwd=REPOSITORY, env={**os.environ, **variables}, check=False
    )
    if done.returncode != 0:
        raise DeviceError(f"./pants {goal} {' '.join(targets)} failed: see above. {_advice(services, variant)}".strip())


def choose_platform(variant: str) -> Platform:
    """The pins of a variant, with the base images that this machine builds on.

    The image that DEBOOTSTRAP=1 made replaces the pinned ones where it exists. The variables BASE and SLIM_BASE replace
    both, and PINNED_PYTHON the version of Python that they must have.
    """
    platform = read_platforms()[variant]
    if platform.debian and not os.environ.get("BASE") and has_image(platform.debian.slim):
        print(f"base image: {platform.debian.slim}, made on this machine by DEBOOTSTRAP=1", file=sys.stderr)
        platform = platform.on_debian()
    base, has_one_base = os.environ.get("BASE"), platform.platform == platform.slim
    return replace(
        platform,
        platform=base or platform.platform,
        slim=os.environ.get("SLIM_BASE") or (has_one_base and base) or platform.slim,
        python=os.environ.get("PINNED_PYTHON") or platform.python,
    )


def place_ca_bundle() -> None:
    """Copy the CA bundle that this machine uses to where the builder stages read it."""
    name = next((name for name in CA_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return  # a bundle that an earlier call copied stays: without it every layer would be made again
    source = os.environ[name]
    if not Path(source).is_file():
        raise RecipeError(f"{name}: {source} is not a file. Set it to the PEM file that verifies your package index.")
    if not CA_BUNDLE.exists() or CA_BUNDLE.read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, CA_BUNDLE)


def build_arguments(build: Build, platform: Platform) -> dict[str, str]:
    """Build arguments of an image, without those of the package index."""
    has_program = build.service in STAGES_WITH_PROGRAM
    driver = {DRIVER_ARGUMENTS[type(platform.node)]: platform.node.driver} if platform.node and has_program else {}
    return {
        **({"SERVICE": build.service} if has_program else {}),
        "VARIANT": platform.variant,
        "BASE": base_of(build.service, platform),
        "PINNED_PYTHON": platform.python,
        "RAY_VERSION": platform.ray,
        "SDK_VERSION": platform.sdk or "none",
        **driver,
        "STAGE_VERSION": build.version,
        "GIT_SHA": build.git_sha,
        "IMAGE": f"{repository_of(build.service)}:{build.commit_tag}",
    }


def base_of(service: str, platform: Platform) -> str:
    """Name of the base image, with the digest if `make lock PIN=1` resolved one."""
    base = platform.base_of(service)
    digest = read_digests().get(base)
    return f"{base}@{digest}" if digest else base


def repository_of(service: str, registry: str | None = None) -> str:
    registry = (os.environ.get("REGISTRY", "") if registry is None else registry).rstrip("/")
    return f"{registry}/millrace/{service}" if registry else f"millrace/{service}"


def names_of(build: Build, registry: str | None = None) -> list[str]:
    """Full names of an image, such as `registry/millrace/trainer:0.1.0-cpu`; the one with the commit's tag is last.

    In a registry, the version's tag names the release alone: its sources, on the pinned base image.
    """
    repository = repository_of(build.service, registry)
    is_local = "/millrace/" not in repository
    is_pinned = choose_platform(build.variant) == read_platforms()[build.variant]
    tags = [build.tag] if is_local or (is_pinned and is_released(build)) else []
    return [f"{repository}:{tag}" for tag in (*tags, build.commit_tag)]


def print_settings() -> None:
    """Print what images/BUILD reads, a line for each image: its target, its tags with commas, its build arguments.

    The variable HELD_IMAGES has the names that `publish_images` leaves out.
    """
    place_ca_bundle()
    held = os.environ.get("HELD_IMAGES", "").split()
    for variant in VARIANTS:
        platform = choose_platform(variant)
        for service in SERVICES:
            build = describe_build(service, variant)
            tags = [name.rpartition(":")[2] for name in names_of(build) if name not in held]
            arguments = (f"{name}={value}" for name, value in build_arguments(build, platform).items())
            print(f"{service}-{variant}", ",".join(tags) or build.commit_tag, *arguments)


def require_committed(services: Sequence[str], variant: str) -> None:
    """Raises `RecipeError` when the sources of a service are not committed."""
    builds = [describe_build(service, variant) for service in services]
    uncommitted = [build.commit_tag for build in builds if build.change or build.commit == "unknown"]
    if uncommitted:
        raise RecipeError(
            f"PUSH= takes committed sources only, and these differ from the last commit: {', '.join(uncommitted)}. "
            f"Nothing was built. Commit, and run it again."
        )


def _advice(services: Sequence[str], variant: str) -> str:
    """Return what to do where the base image is not on this machine, which may be unable to pull it."""
    platform = choose_platform(variant)
    absent = {platform.base_of(service) for service in services} - {""}
    absent = {base for base in absent if not has_image(base)}
    if not absent:
        return ""
    if platform.debian:
        return f"If this machine cannot pull {', '.join(absent)}: make images DEBOOTSTRAP=1 makes a base without one."
    return f"If this machine cannot pull {', '.join(absent)}, name another: make images VARIANT={variant} BASE=..."
