"""Builds the images of one variant with `docker build`, one Dockerfile per service."""

from __future__ import annotations

import os
import shlex
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
    read_digests,
    read_platforms,
)
from images.registry import find_image
from images.versions import Build, describe_build, is_released
from services.common.credentials import mask
from services.common.errors import DeviceError, RecipeError

LOGS = REPOSITORY / "dist/logs"
CA_BUNDLE = REPOSITORY / "images/inputs/ca-bundle.crt"
# Where other programs are told of a CA bundle; the build uses the same one.
CA_VARIABLES = ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
PASSED_ON = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL", "TORCH_FIND_LINKS"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)

# The ARG of a Dockerfile by the kind of node whose driver it names.
DRIVER_ARGUMENTS = {CudaNode: "NVIDIA_DRIVER", NeuronNode: "NEURON_DRIVER"}


@dataclass(frozen=True)
class Image:
    """One image that was built."""

    build: Build
    names: tuple[str, ...]
    """`registry/millrace/<service>:<tag>`, the commit's tag last."""
    seconds: float


def build_images(services: Sequence[str], variant: str) -> list[Image]:
    """Build the images of `services`. Raises `DeviceError` when Docker, a base image or a package is out of reach."""
    platform = choose_platform(variant)
    place_ca_bundle()
    return [build_image(service, platform) for service in services]


def choose_platform(variant: str) -> Platform:
    """The variant's pin, on the base of `make base-image` where that was made, or on the bases the environment names.

    BASE and SLIM_BASE replace the base images, PINNED_PYTHON the Python they must have.
    """
    platform = read_platforms()[variant]
    if platform.debian and not os.environ.get("BASE") and has_image(platform.debian.slim):
        print(f"base: {platform.debian.slim}, made here by make base-image", file=sys.stderr)
        platform = platform.on_debian()
    return replace(
        platform,
        platform=os.environ.get("BASE") or platform.platform,
        slim=os.environ.get("SLIM_BASE") or (platform.has_one_base and os.environ.get("BASE")) or platform.slim,
        python=os.environ.get("PINNED_PYTHON") or platform.python,
    )


def place_ca_bundle() -> None:
    """Put the CA bundle that this machine uses where the builder stages read it."""
    name = next((name for name in CA_VARIABLES if os.environ.get(name)), None)
    if name is None:
        return  # one that an earlier call placed stays: without it every layer would be made anew
    source = os.environ[name]
    if not Path(source).is_file():
        raise RecipeError(f"{name}: {source} is no file. Name the PEM file that your package index is signed with.")
    if not CA_BUNDLE.exists() or CA_BUNDLE.read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, CA_BUNDLE)


def build_image(service: str, platform: Platform) -> Image:
    build = describe_build(service, platform.variant)
    names = tuple(f"{repository_of(service)}:{tag}" for tag in (build.tag, build.commit_tag))
    print(f"building {names[-1]} on {base_of(service, platform)}", flush=True)
    command = ["build", "--file", f"services/{service}/Dockerfile"]
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
    """The ARGs of a Dockerfile, but for those of the package index."""
    has_program = build.service in STAGES_WITH_PROGRAM
    driver = {DRIVER_ARGUMENTS[type(platform.node)]: platform.node.driver} if platform.node and has_program else {}
    return {
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
    """The base image, with the digest that `make pin` resolved."""
    base = platform.base_of(service)
    digest = read_digests().get(base)
    return f"{base}@{digest}" if digest else base


def repository_of(service: str) -> str:
    registry = os.environ.get("REGISTRY", "").rstrip("/")
    if mask(registry) != registry:  # it becomes part of names and labels
        raise RecipeError("REGISTRY: holds a user or a password. Run `docker login`, and name the registry alone.")
    return f"{registry}/millrace/{service}" if registry else f"millrace/{service}"


def print_sizes(images: Sequence[Image]) -> None:
    """One line per image: what it weighs, what of that is code, and how long the build took."""
    print(f"\n{'image':58} {'size':>10} {'code':>9} {'built in':>9}")
    for image in images:
        size = inspect_image(image.names[-1])["Size"]
        code = sum(layer_bytes for made_by, layer_bytes in _layers(image.names[-1]) if "/app/services" in made_by)
        print(f"{image.names[-1]:58} {_megabytes(size):>10} {_kilobytes(code):>9} {image.seconds:>7.0f} s")


def print_environment() -> None:
    """Print what BUILD files read with `env()`: `export NAME=value` lines, quoted for a shell, and nothing else."""
    place_ca_bundle()
    for variant in VARIANTS:
        platform = _platform_without_engine(variant)
        for service in SERVICES:
            build = describe_build(service, variant)
            arguments = " ".join(f"{name}={value}" for name, value in build_arguments(build, platform).items())
            values = {"TAG": build.tag, "COMMIT_TAG": build.commit_tag, "BUILD_ARGS": arguments}
            for name, value in values.items():
                print(f"export {service.upper()}_{variant.upper()}_{name}={shlex.quote(value)}")


def _platform_without_engine(variant: str) -> Platform:
    # Pants also lists and tests where there is no Docker.
    return choose_platform(variant) if shutil.which("docker") else read_platforms()[variant]


def _layers(name: str) -> list[tuple[str, int]]:
    text = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", name)
    lines = [line.partition("\t") for line in text.splitlines()]
    return [(made_by, int(size)) for size, _, made_by in lines]


def _advice(service: str, platform: Platform) -> str:
    base = platform.base_of(service)
    if has_image(base):
        return ""
    if platform.debian:
        return f"If {base} cannot be pulled here, `make base-image` makes a base without a registry."
    other = f"make images VARIANT={platform.variant} BASE=... SLIM_BASE=..."
    return f"If {base} cannot be pulled here, name one that can: {other}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.0f} kB"


def require_committed(services: Sequence[str], variant: str) -> None:
    """Raises `RecipeError` when a service's sources are in no commit: what is pushed must be found again."""
    builds = [describe_build(service, variant) for service in services]
    loose = [build.commit_tag for build in builds if build.change or build.commit == "unknown"]
    if loose:
        raise RecipeError(
            f"not built for a push, because no commit has these sources: {', '.join(loose)}. Commit first."
        )


def push_images(images: Sequence[Image], variant: str, registry: str) -> None:
    """Push to `registry/millrace/<service>`: the commit's tag, and the version's where this is what was released.

    A version stands for the pinned base, too. What the registry has already is not pushed again. A tag stays what it
    is, whether the registry holds it to that or not: when one has other content there, nothing at all is pushed.

    Raises `DeviceError` for such a tag, and when the registry refuses.
    """
    is_pinned = choose_platform(variant) == read_platforms()[variant]
    tags = {
        image: [image.build.commit_tag] + ([image.build.tag] if is_pinned and is_released(image.build) else [])
        for image in images
    }
    names = {
        f"{registry.rstrip('/')}/millrace/{image.build.service}:{tag}": image for image in images for tag in tags[image]
    }
    held = {name: _is_held(name, image, registry) for name, image in names.items()}
    for name, image in names.items():
        if not held[name]:
            _push(name, image, registry)
        print(f"{'there already' if held[name] else 'pushed'} {name}", flush=True)
    for image in images:
        if image.build.tag not in tags[image]:
            build = image.build
            reason = f"the sources of {build.service}-v{build.version}" if is_pinned else "on the base of the pin"
            print(f"  {build.service} not as {build.tag}: this is not {reason}")


def _push(name: str, image: Image, registry: str) -> None:
    docker("tag", image.names[-1], name)
    try:
        docker("push", "--quiet", name, advice=_push_advice(registry))
    except DeviceError:
        # Another push was faster, or the answer to ours was lost; a registry with immutable tags refuses both.
        if not _is_held(name, image, registry):
            raise


def _is_held(name: str, image: Image, registry: str) -> bool:
    """Does the registry have just this image under the name? Raises `DeviceError` when it has another one."""
    try:
        held = find_image(name)
    except DeviceError as error:
        raise DeviceError(f"{error} {_push_advice(registry)}") from error
    if held is None:
        return False
    ours = inspect_image(image.names[-1])
    digests = {each.rpartition("@")[2] for each in ours.get("RepoDigests") or []}
    # Docker's own store calls an image by its configuration, containerd's by its manifest.
    if ours["Id"] in (held.configuration, held.digest) or held.digest in digests:
        return True
    raise DeviceError(
        f"{name} is in the registry with other content ({held.digest}) than what is built here ({ours['Id']}), and a "
        f"tag stays what it is: nothing is pushed over it. The image there has the same sources: TAG={name} "
        f"deploys it. Another image needs another commit, or a release of its own: make release BUMP=patch"
    )


def _push_advice(registry: str) -> str:
    return f"Is {registry} the right registry, does the repository exist, and did you `docker login`?"


def require_service(name: str, services: Sequence[str] = SERVICES) -> str:
    if name not in services:
        raise RecipeError(f"there is no stage {name!r}: STAGE is one of {', '.join(services)}")
    return name


def require_variant(name: str) -> str:
    if name not in VARIANTS:
        raise RecipeError(f"there is no variant {name!r}: VARIANT is one of {', '.join(VARIANTS)}")
    return name
