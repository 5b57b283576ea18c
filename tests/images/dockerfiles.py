"""Reads the instructions of Dockerfiles."""

from __future__ import annotations

import re

from images.platforms import REPOSITORY, dockerfile_of

Instruction = tuple[str, str]


def read_dockerfile(service: str, variant: str = "cpu") -> str:
    """The text of a service's Dockerfile, for one variant."""
    text = (REPOSITORY / dockerfile_of(service)).read_text(encoding="utf-8")
    return re.sub(r"\$\{?SERVICE\b\}?", service, text).replace("${VARIANT}", variant)


def instructions_of(text: str) -> list[Instruction]:
    """Name and arguments of all instructions; a continued line is one, and comments are left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def labels_of_image(text: str) -> dict[str, str]:
    """The labels of the final image: of the last stage, which has no name, and of the stages that it stands on."""
    bases: dict[str, str] = {}
    labels: dict[str, str] = {}
    for name, rest in instructions_of(text):
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            bases[stage], labels[stage] = base, ""
        elif name == "LABEL":
            labels[stage] += f" {rest}"
    lines, stage = "", ""
    while stage in bases:
        lines, stage = labels[stage] + lines, bases[stage]
    return {name: value.strip('"') for name, value in re.findall(r'([\w.-]+)=("[^"]*"|\S+)', lines)}
