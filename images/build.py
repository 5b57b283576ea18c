"""Builds the images of one variant with `./pants package`, and pushes them with `./pants publish`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from images.platforms import REPOSITORY, SERVICES, STAGES_WITH_PROGRAM, VARIANTS, Platform, read_digests, read_platforms
from images.registry import is_held
from images.versions import Build, describe_build, is_released
from services.common.errors import DeviceError, RecipeError


def build_images(services: Sequence[str], variant: str) -> None:
    """Build the images of `services` with Pants. Raises `DeviceError` when it fails, as without a base image."""
    _run_pants("package", services, variant)


def publish_images(services: Sequence[str], variant: str, registry: str) -> None:
    """Build the images of `services`, and push them as `registry/millrace/<service>`.

    Every image gets its commit's tag, and a release on the pinned base image its version's, too. A tag that the
    registry has already names an image of the same sources: it is left out and never replaced.

    Raises `RecipeError` when sources are not committed, and `DeviceError` when the registry refuses a push.
    """
    builds = [describe_build(service, variant) for service in services]
    if uncommitted := [build.commit_tag for build in builds if not build.is_committed]:
        raise RecipeError(
            f"PUSH= takes committed sources only, and these differ from the last commit: {', '.join(uncommitted)}. "
            f"Nothing was built. Commit, and run it again."
        )
    for build in builds:
        if is_released(build) and (reason := explain_unpinned(build)):
            print(f"{build.tag} is not pushed, only {build.commit_tag}: {reason}", flush=True)
    names = {build.service: names_of(build, registry) for build in builds}
    held = [name for each in names.values() for name in each if is_held(name)]
    for name in held:
        print(f"already there: {name}", flush=True)
    if missing := [service for service in services if not set(names[service]) <= set(held)]:
        _run_pants("publish", missing, variant, REGISTRY=registry, HELD_IMAGES=" ".join(held))


def _run_pants(goal: str, services: Sequence[str], variant: str, **variables: str) -> None:
    # pants.toml leaves out every variant but cpu.
    chosen = [] if variant == "cpu" else [f"--tag=['{variant}']"]
    targets = [f"images:{service}-{variant}" for service in services]
    command = ["./pants", *chosen, goal, *targets]
    platform = choose_platform(variant)
    print("base images:", *sorted({platform.base_of(service) for service in services}), flush=True)
    if subprocess.run(command, cwd=REPOSITORY, env=os.environ | variables, check=False).returncode != 0:
        raise DeviceError(
            f"./pants {goal} {' '.join(targets)} failed: see above. Where the base image cannot be pulled, "
            f"make images DEBOOTSTRAP=1 makes one without a registry, and BASE= and SLIM_BASE= name others."
        )


def require_engine() -> None:
    """Raises `DeviceError` when docker is not installed or its engine does not answer."""
    if shutil.which("docker") is None:
        raise DeviceError(
            "docker is not on PATH. Install Docker (Debian: apt-get install docker.io). "
            "`make demo` and `make test` do not need it."
        )
    answer = _run_docker("version", "--format", "{{.Server.Version}}")
    if answer.returncode != 0:
        raise DeviceError(f"the Docker engine does not answer: {answer.stderr.strip()}")


def has_image(name: str) -> bool:
    """Return whether this machine has an image of this name; False also where Docker is not installed."""
    return shutil.which("docker") is not None and _run_docker("image", "inspect", name).returncode == 0


def _run_docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)


def make_base_image(variant: str) -> None:
    """Make the variant's base image with debootstrap, unless it exists; `docker rmi` makes room for a new one.

    Raises `DeviceError` when a tool is missing, and when Debian has another Python than the pinned one.
    """
    debian = read_platforms()[variant].debian
    if debian is None:
        raise DeviceError(
            f"the {variant} variant has no Debian base image in images/platforms.toml. Name base images that you have: "
            f"make images VARIANT={variant} BASE=... SLIM_BASE=... PINNED_PYTHON=..."
        )
    require_engine()
    if has_image(debian.slim):  # a new one would have another id, and every image would be built again
        return
    command = ["bash", "images/make_base.sh", debian.suite, debian.python, debian.slim]
    if subprocess.run(command, cwd=REPOSITORY, check=False).returncode != 0:
        raise DeviceError(f"{debian.slim} was not made: see above")


def choose_platform(variant: str) -> Platform:
    """The pins of a variant, with the base images that this machine builds on.

    The image that DEBOOTSTRAP=1 made replaces the pinned ones where it exists. The variables BASE and SLIM_BASE replace
    both, and PINNED_PYTHON the version of Python that they must have.
    """
    platform, base = read_platforms()[variant], os.environ.get("BASE")
    if (debian := platform.debian) and not base and has_image(debian.slim):
        platform = replace(platform, python=debian.python, slim=debian.slim, platform=debian.slim)
    has_one_base = platform.platform == platform.slim
    return replace(
        platform,
        platform=base or platform.platform,
        slim=os.environ.get("SLIM_BASE") or (has_one_base and base) or platform.slim,
        python=os.environ.get("PINNED_PYTHON") or platform.python,
    )


def repository_of(service: str, registry: str | None = None) -> str:
    registry = (os.environ.get("REGISTRY", "") if registry is None else registry).rstrip("/")
    return f"{registry}/millrace/{service}" if registry else f"millrace/{service}"


def names_of(build: Build, registry: str | None = None) -> list[str]:
    """Full names of an image, such as `registry/millrace/trainer:0.1.0-cpu`; the one with the commit's tag is last.

    In a registry, the version's tag names the release alone: its sources, on the pinned base image.
    """
    repository = repository_of(build.service, registry)
    if "/millrace/" in repository and (not is_released(build) or explain_unpinned(build)):
        return [f"{repository}:{build.commit_tag}"]
    return [f"{repository}:{build.tag}", f"{repository}:{build.commit_tag}"]


def explain_unpinned(build: Build) -> str:
    """Return why another build of an image may stand on another base image; empty where its base image is pinned."""
    platform = read_platforms()[build.variant]
    base = platform.base_of(build.service)
    if choose_platform(build.variant) != platform:
        return f"this machine builds on another base image than {base}"
    if platform.sdk and base not in read_digests():
        return f"{base} has no digest in images/platforms.toml: make refresh-pins WRITE=1, then commit it"
    return ""


def print_settings() -> None:
    """Print what images/BUILD reads, a line for each image: its target, its tags with commas, its build arguments.

    The variable HELD_IMAGES has the names that `publish_images` leaves out.
    """
    held = os.environ.get("HELD_IMAGES", "").split()
    for variant in VARIANTS:
        platform = choose_platform(variant)
        for service in SERVICES:
            build = describe_build(service, variant)
            tags = [name.rpartition(":")[2] for name in names_of(build) if name not in held]
            arguments = (f"{name}={value}" for name, value in _build_arguments(build, platform).items())
            print(f"{service}-{variant}", ",".join(tags) or build.commit_tag, *arguments)


def _build_arguments(build: Build, platform: Platform) -> dict[str, str]:
    """Build arguments of an image, without those of the package index."""
    base = platform.base_of(build.service)
    digest = read_digests().get(base)
    of_program = {
        "SERVICE": build.service,
        "NVIDIA_DRIVER": platform.nvidia_driver or "none",
        "NEURON_DRIVER": platform.node.driver if platform.node else "none",
    }
    return {
        **(of_program if build.service in STAGES_WITH_PROGRAM else {}),
        "VARIANT": platform.variant,
        "BASE": f"{base}@{digest}" if digest else base,
        "PINNED_PYTHON": platform.python,
        "RAY_VERSION": platform.ray,
        "SDK_VERSION": platform.sdk or "none",
        "STAGE_VERSION": build.version,
        "GIT_SHA": build.git_sha,
        "IMAGE": f"{repository_of(build.service)}:{build.commit_tag}",
    }
