"""Builds and releases the container images: `python -m images COMMAND`.

The commands read variables such as STAGE and VARIANT from the environment, which `make help` lists.
"""

from __future__ import annotations

import argparse
import os
import sys

from images.build import (
    build_images,
    explain_unpinned,
    make_base_image,
    print_settings,
    publish_images,
    repository_of,
    require_engine,
)
from images.lock import lock
from images.platforms import SERVICES, VARIANTS
from images.release import release
from images.sbom import write_sboms
from images.versions import describe_build
from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_of, run_main


def main(argv: list[str]) -> int:
    commands = {
        "base": lambda: make_base_image(_variant()),
        "build": build,
        "lock": lambda: lock(upgrade=os.environ.get("UPGRADE", "") not in ("", "0")),
        "names": print_names,
        "release": release_stage,
        "sbom": lambda: print(*write_sboms(_services(), _variant()), sep="\n"),
        "settings": print_settings,
    }
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args(argv).command]()
    return 0


def build() -> None:
    """Build the images of STAGE (default: all) and VARIANT (default: cpu), and push them to PUSH if it is set."""
    services, variant = _services(), _variant()
    require_engine()
    if registry := os.environ.get("PUSH"):
        publish_images(services, variant, registry)
    else:
        build_images(services, variant)


def print_names() -> None:
    """Print the names that `build` gives to the images of STAGE (default: all) and VARIANT (default: cpu)."""
    for service in _services():
        print(f"{repository_of(service)}:{describe_build(service, _variant()).commit_tag}")


def release_stage() -> None:
    """Release STAGE as VERSION."""
    service = _choice("STAGE", SERVICES)
    tag = release(service, os.environ.get("VERSION", ""))
    print(f"released {tag}. Nothing was pushed yet: git push --follow-tags, then for each variant that you deploy:")
    command = "make cluster-up HEAD_TAG=" if service == "head" else f"make deploy-stage STAGE={service} TAG="
    for variant in VARIANTS:
        build = describe_build(service, variant)
        reason = explain_unpinned(build)
        print(f"  make images STAGE={service} VARIANT={variant} PUSH=REGISTRY")
        print(f"  {command}{build.commit_tag if reason else build.tag}")
        if reason:
            print(f"      # not {build.tag}: {reason}")


def _services() -> tuple[str, ...]:
    return (_choice("STAGE", SERVICES),) if os.environ.get("STAGE") else SERVICES


def _variant() -> str:
    return _choice("VARIANT", VARIANTS) if os.environ.get("VARIANT") else "cpu"


def _choice(variable: str, known: tuple[str, ...]) -> str:
    value = os.environ.get(variable, "")
    if value not in known:
        raise RecipeError(f"{variable} is {value!r}, expected one of {', '.join(known)}")
    return value


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_main(main, sys.argv[1:])))
