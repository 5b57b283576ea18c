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


def stages_of_image(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of the stages that make up the final image, by stage, the last stage first."""
    bases: dict[str, str] = {}
    stages: dict[str, list[Instruction]] = {"": []}
    stage = ""
    for name, rest in instructions_of(text):
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            bases[stage], stages[stage] = base, []
        else:
            stages[stage].append((name, rest))
    chain = [""]  # the last stage has no name
    while bases[chain[-1]] in stages:
        chain.append(bases[chain[-1]])
    return {name: stages[name] for name in chain}


def settings_of_image(text: str, instruction: str) -> dict[str, str]:
    """Names and values that the instructions ENV or LABEL give to the final image."""
    lines = [rest for stage in reversed(stages_of_image(text).values()) for name, rest in stage if name == instruction]
    pairs = re.findall(r'([\w.-]+)=("[^"]*"|\S+)', " ".join(lines))
    return {name: value.strip('"') for name, value in pairs}
