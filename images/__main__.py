"""Builds, runs and releases the container images: `python -m images COMMAND`.

The Makefile's targets call it and say which variables each takes; it reads them from the environment.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from images.base import make_base_image
from images.build import (
    build_images,
    print_environment,
    print_sizes,
    push_images,
    repository_of,
    require_committed,
    require_service,
    require_variant,
)
from images.check import differences
from images.demo import STAGES, run_stages
from images.docker import require_engine
from images.lock import lock
from images.pin import pin
from images.platforms import REPOSITORY, SERVICES, CudaNode, NeuronNode, read_digests, read_platforms
from images.release import release
from images.sbom import write_sboms
from images.versions import describe_build
from services.common.entry_point import exit_code_of
from services.common.errors import RecipeError


def main(argv: list[str]) -> int:
    commands = {
        "base": lambda: make_base_image(_variant()),
        "build": build,
        "check": check,
        "demo": demo,
        "environment": print_environment,
        "lock": lambda: lock(upgrade=os.environ.get("UPGRADE", "") not in ("", "0")),
        "names": print_names,
        "pin": pin_bases,
        "platforms": print_platforms,
        "release": release_stage,
        "sbom": sbom,
    }
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args(argv).command]()
    return 0


def build() -> None:
    """STAGE (all), VARIANT (cpu), PUSH=registry."""
    services, variant, registry = _services(SERVICES), _variant(), os.environ.get("PUSH")
    require_engine()
    if registry:
        require_committed(services, variant)
    images = build_images(services, variant)
    print_sizes(images)
    if registry:
        push_images(images, variant, registry)


def check() -> None:
    problems = differences()
    if problems:
        raise RecipeError("the images of a variant differ:\n  " + "\n  ".join(problems))
    print("images: all of a variant have its pin")


def demo() -> None:
    """STAGE (all three), VARIANT (cpu), RECIPE, ROOT, OPTIONS, and <STAGE>_TAG for another version of a stage."""
    recipe = Path(os.environ.get("RECIPE") or REPOSITORY / "recipes/tiny-cpu.toml")
    root = Path(os.environ.get("ROOT") or "fsx")
    run_stages(_services(STAGES), _variant(), recipe, root, shlex.split(os.environ.get("OPTIONS", "")))


def print_names() -> None:
    """The names that `build` gives: STAGE (all), VARIANT (cpu)."""
    for service in _services(SERVICES):
        print(f"{repository_of(service)}:{describe_build(service, _variant()).commit_tag}")


def pin_bases() -> None:
    for image, digest in pin().items():
        print(f"{image} is {digest}")


def print_platforms() -> None:
    """What all images of a variant share, and what a node must have for them."""
    for variant, platform in read_platforms().items():
        print(f"{variant}: Python {platform.python}, Ray {platform.ray}, torch {platform.torch}")
        for base in dict.fromkeys([platform.slim, platform.platform]):
            print(f"  base    {base}@{read_digests().get(base, 'unpinned: make pin')}")
        node = platform.node
        if isinstance(node, CudaNode):
            print(f"  CUDA    {platform.cuda}, with torch")
            print(f"  node    NVIDIA driver {node.driver} or newer, and the NVIDIA Container Toolkit")
        if isinstance(node, NeuronNode):
            print(f"  SDK     Neuron {platform.sdk}")
            print(f"  node    driver aws-neuronx-dkms {node.driver}, in any case before {node.driver_before}")
            print(f"          device plugin {node.device_plugin}")
            print(f"          EKS AMI {node.ami_type}, of a release in infra/aws_releases.json")
            print(f"          instances of {' and '.join(node.instance_families)}")


def release_stage() -> None:
    """STAGE and BUMP=major|minor|patch."""
    if not os.environ.get("STAGE"):
        raise RecipeError("make release releases one stage: make release STAGE=trainer BUMP=minor")
    new = release(require_service(os.environ["STAGE"]), os.environ.get("BUMP", ""))
    print(f"released {new.tag}, not pushed: git push --follow-tags, then for each VARIANT:")
    print(f"  make images STAGE={new.service} VARIANT=cpu PUSH=registry")


def sbom() -> None:
    for path in write_sboms(_services(SERVICES), _variant()):
        print(path)


def _services(known: tuple[str, ...]) -> tuple[str, ...]:
    stage = os.environ.get("STAGE")
    return (require_service(stage, known),) if stage else known


def _variant() -> str:
    return require_variant(os.environ.get("VARIANT") or "cpu")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
