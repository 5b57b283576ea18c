"""Compares the defaults of the Dockerfiles and the locks with the pins in `platforms.toml`.

It reads only files of the repository and needs no Docker; a build checks the base image itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from images.lock import BROUGHT, UNION, pins_of
from images.platforms import REPOSITORY, SERVICES, STAGES_WITH_PROGRAM, Platform, dockerfile_of, read_platforms


def differences(repository: Path = REPOSITORY) -> list[str]:
    """Return a line for every file that differs from its variant's pin, or from another file of the variant."""
    platforms = read_platforms(repository / "images/platforms.toml")
    problems = [problem for service in SERVICES for problem in _check_dockerfile(repository, service, platforms["cpu"])]
    problems += [problem for platform in platforms.values() for problem in _check_locks(repository, platform)]
    return list(dict.fromkeys(problems))  # two services may have one Dockerfile


def _check_dockerfile(repository: Path, service: str, cpu: Platform) -> list[str]:
    dockerfile = dockerfile_of(service)
    found = dict(re.findall(r"^ARG (\w+)=(.*)$", (repository / dockerfile).read_text(encoding="utf-8"), re.MULTILINE))
    wanted = {"BASE": cpu.base_of(service), "VARIANT": "cpu", "PINNED_PYTHON": cpu.python, "RAY_VERSION": cpu.ray}
    return [
        f"{dockerfile}: ARG {name} is {found.get(name)}, images/platforms.toml says {value}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]


def _check_locks(repository: Path, platform: Platform) -> list[str]:
    """All locks of a variant have the same version of a package, and the pinned Ray, torch and CUDA."""
    variant, problems = platform.variant, []
    with_program = [f"lockfiles/{service}-{variant}.txt" for service in STAGES_WITH_PROGRAM]
    files = [str(UNION[variant].relative_to(REPOSITORY)), *(f"lockfiles/{each}-{variant}.txt" for each in SERVICES)]
    brought = str(BROUGHT[variant].relative_to(REPOSITORY)) if variant in BROUGHT else ""
    pins = {file: pins_of(repository / file) for file in (*files, *filter(None, [brought]))}
    first = {"ray": ("images/platforms.toml", platform.ray), "torch": ("images/platforms.toml", platform.torch)}
    for file, lock in pins.items():
        for package, version in lock.items():
            other, theirs = first.setdefault(package, (file, version))
            if theirs != version:
                problems.append(f"{file}: {package} is {version}, {other} has {theirs}: make lock")
    for file in with_program:
        if platform.cuda and not pins[file].get("cuda-toolkit", "").startswith(f"{platform.cuda}."):
            problems.append(f"{file}: cuda-toolkit is {pins[file].get('cuda-toolkit')}, the pin is {platform.cuda}")
        if brought:
            problems += [
                f"{file}: {each} would replace that of {brought}" for each in pins[file].keys() & pins[brought]
            ]
    return problems
