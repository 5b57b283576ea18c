"""Builds the images of one variant with `docker build`, and pushes them to a registry."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from images.docker import docker, docker_logged, has_image, inspect_image
from images.platforms import (
    REPOSITORY,
    SERVICES,
    STAGES_WITH_PROGRAM,
    VARIANTS,
    CudaNode,
    NeuronNode,
    Platform,
    dockerfile_of,
    read_digests,
    read_platforms,
)
from images.registry import find_image
from images.versions import Build, describe_build, is_released
from services.common.errors import DeviceError, RecipeError

LOGS = REPOSITORY / "dist/logs"
CA_BUNDLE = REPOSITORY / "images/inputs/ca-bundle.crt"
# Variables that name a user's CA bundle, for this or other programs; the build uses the first that is set.
CA_VARIABLES = ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
# Build arguments that docker takes from the environment: they may contain a token, which a command line would show.
PASSED_ON = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL", "TORCH_FIND_LINKS"),
    *("NEURON_INDEX_URL", "NEURON_FIND_LINKS", "NEURON_APT_URL", "UV_PYTHON_INSTALL_MIRROR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)

# The build argument that says which driver a node must have.
DRIVER_ARGUMENTS = {CudaNode: "NVIDIA_DRIVER", NeuronNode: "NEURON_DRIVER"}


@dataclass(frozen=True)
class Image:
    """An image that was built on this machine."""

    build: Build
    names: tuple[str, ...]
    """Full names, such as `registry/millrace/trainer:0.1.0-cpu`; the one with the commit's tag is last."""
    seconds: float
    """Duration of the build."""


def build_images(services: Sequence[str], variant: str) -> list[Image]:
    """Build the images of `services`. Raises `DeviceError` when Docker fails, as without a base image or a package."""
    platform = choose_platform(variant)
    place_ca_bundle()
    return [build_image(service, platform) for service in services]


def choose_platform(variant: str) -> Platform:
    """The pins of a variant, with the base images that this machine builds on.

    The image of `make base-image` replaces the pinned ones where it exists. The variables BASE and SLIM_BASE replace
    both, and PINNED_PYTHON the version of Python that they must have.
    """
    platform = read_platforms()[variant]
    if platform.debian and not os.environ.get("BASE") and has_image(platform.debian.slim):
        print(f"base image: {platform.debian.slim}, which `make base-image` made on this machine", file=sys.stderr)
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


def build_image(service: str, platform: Platform) -> Image:
    build = describe_build(service, platform.variant)
    names = tuple(f"{repository_of(service)}:{tag}" for tag in (build.tag, build.commit_tag))
    print(f"building {names[-1]} on {base_of(service, platform)}", flush=True)
    command = ["build", "--file", dockerfile_of(service)]
    for name in names:
        command += ["--tag", name]
    for name, value in build_arguments(build, platform).items():
        command += ["--build-arg", f"{name}={value}"]
    command += [flag for name in PASSED_ON if os.environ.get(name) for flag in ("--build-arg", name)]
    started = time.monotonic()
    docker_logged(
        *command,
        str(REPOSITORY),
        log=LOGS / f"{service}-{platform.variant}.log",
        advice=_advice(service, platform),
    )
    return Image(build, names, time.monotonic() - started)


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
    """Name of the base image, with the digest if `make pin` resolved one."""
    base = platform.base_of(service)
    digest = read_digests().get(base)
    return f"{base}@{digest}" if digest else base


def repository_of(service: str) -> str:
    registry = os.environ.get("REGISTRY", "").rstrip("/")
    return f"{registry}/millrace/{service}" if registry else f"millrace/{service}"


def print_sizes(images: Sequence[Image]) -> None:
    """Print a line for each image: its size, the size of its code, and the duration of the build."""
    print(f"\n{'image':58} {'size':>10} {'code':>9} {'built in':>9}")
    for image in images:
        name = image.names[-1]
        layers = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", name)
        code = sum(int(layer.partition("\t")[0]) for layer in layers.splitlines() if "/app/" in layer)
        megabytes, kilobytes = f"{inspect_image(name)['Size'] / 1e6:,.0f} MB", f"{code / 1e3:,.0f} kB"
        print(f"{name:58} {megabytes:>10} {kilobytes:>9} {image.seconds:>7.0f} s")


def print_settings() -> None:
    """Print what images/BUILD reads, a line for each image: its target, its two tags, and its build arguments."""
    place_ca_bundle()
    for variant in VARIANTS:
        platform = choose_platform(variant)
        for service in SERVICES:
            build = describe_build(service, variant)
            arguments = (f"{name}={value}" for name, value in build_arguments(build, platform).items())
            print(f"{service}-{variant}", build.tag, build.commit_tag, *arguments)


def _advice(service: str, platform: Platform) -> str:
    base = platform.base_of(service)
    if has_image(base):
        return ""
    if platform.debian:
        return f"If this machine cannot pull {base}, `make base-image` makes a base image without a registry."
    other = f"make images VARIANT={platform.variant} BASE=... SLIM_BASE=..."
    return f"If this machine cannot pull {base}, name a base image that it can pull: {other}"


def require_committed(services: Sequence[str], variant: str) -> None:
    """Raises `RecipeError` when the sources of a service are not committed."""
    builds = [describe_build(service, variant) for service in services]
    uncommitted = [build.commit_tag for build in builds if build.change or build.commit == "unknown"]
    if uncommitted:
        raise RecipeError(
            f"PUSH= takes committed sources only, and these differ from the last commit: {', '.join(uncommitted)}. "
            f"Nothing was built. Commit, and run it again."
        )


def push_images(images: Sequence[Image], variant: str, registry: str) -> None:
    """Push the images to `registry/millrace/<service>`, and skip those that the registry has already.

    Every image gets its commit's tag. It gets the version's tag only if its sources are those of the release and its
    base image is the pinned one. When the registry has another image under one of the tags, nothing is pushed, whether
    or not the registry would let the tag be replaced.

    Raises `DeviceError` for such a tag, and when the registry refuses a push.
    """
    is_pinned = choose_platform(variant) == read_platforms()[variant]
    names = {}
    for image in images:
        build = image.build
        repository = f"{registry.rstrip('/')}/millrace/{build.service}"
        names[f"{repository}:{build.commit_tag}"] = image
        if is_pinned and is_released(build):
            names[f"{repository}:{build.tag}"] = image
        else:
            other = f"its sources are not those of {build.service}-v{build.version}"
            reason = other if is_pinned else "its base image is not the pinned one"
            print(f"{build.service} does not get the tag {build.tag}: {reason}", flush=True)
    held = {name: _is_held(name, image) for name, image in names.items()}
    for name, image in names.items():
        if not held[name]:
            _push(name, image)
        print(f"{'already there:' if held[name] else 'pushed'} {name}", flush=True)


def _push(name: str, image: Image) -> None:
    docker("tag", image.names[-1], name)
    try:
        docker("push", "--quiet", name, advice="Does the repository exist, and did you run `docker login`?")
    except DeviceError:
        # Another push of this image was faster, or the response to ours was lost: immutable tags refuse both.
        if not _is_held(name, image):
            raise


def _is_held(name: str, image: Image) -> bool:
    """Return whether the registry has this image under the name. Raises `DeviceError` when it has another image."""
    held = find_image(name)
    if held is None:
        return False
    ours = inspect_image(image.names[-1])
    digests = {each.rpartition("@")[2] for each in ours.get("RepoDigests") or []}
    # The id of an image is the digest of its configuration in Docker's store, and of its manifest in containerd's.
    if ours["Id"] in (held.configuration, held.digest) or held.digest in digests:
        return True
    raise DeviceError(
        f"{name} is in the registry with other content ({held.digest}) than the image on this machine ({ours['Id']}). "
        f"A tag is never replaced, so nothing was pushed. The image in the registry has the same sources: deploy it "
        f"with TAG={name}, or commit a change, or make a release (make release BUMP=patch)."
    )
