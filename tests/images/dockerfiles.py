"""Reads the instructions of Dockerfiles, and checks some rules of hadolint."""

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
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
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


def breaches_of(text: str) -> list[str]:
    """Return a sentence for every rule that the Dockerfile breaks."""
    instructions = instructions_of(text)
    image = [each for stage in reversed(stages_of_image(text).values()) for each in stage]
    runs = [rest for name, rest in instructions if name == "RUN"]
    values = dict(rest.split("=", 1) for name, rest in instructions if name == "ARG" and "=" in rest)
    froms = [rest for name, rest in instructions if name == "FROM"]
    bases = [re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ""), each.split()[0]) for each in froms]
    stages = {each.split()[-1] for each in froms if " AS " in each}
    users = [rest for name, rest in image if name == "USER"]
    rules = {
        "a base has no tag, or latest (DL3006, DL3007)": [
            base for base in bases if base not in stages and (":" not in base or base.endswith(":latest"))
        ],
        "the last user is not a fixed, unprivileged uid (DL3002)": not users or not re.match(r"[1-9]", users[-1]),
        "ADD instead of COPY (DL3020)": [rest for name, rest in instructions if name == "ADD"],
        "apt-get without --no-install-recommends (DL3015)": [
            run for run in runs if "apt-get install" in run and "--no-install-recommends" not in run
        ],
        "apt-get lists stay in the layer (DL3009)": [
            run for run in runs if "apt-get update" in run and "rm -rf /var/lib/apt/lists" not in run
        ],
        "a shell that goes on after an error": [run for run in runs if ";" in run and not run.startswith("set -eu")],
        "sudo (DL3004)": [run for run in runs if "sudo " in run],
        "WORKDIR is relative (DL3000)": [rest for name, rest in instructions if name == "WORKDIR" and rest[0] != "/"],
        "CMD or ENTRYPOINT in shell form (DL3025)": [
            rest for name, rest in instructions if name in ("CMD", "ENTRYPOINT") and not rest.startswith("[")
        ],
        "the history of the image would show an index setting or a secret": [
            rest
            for name, rest in image
            if name == "ARG" and re.match(r"PIP_|TORCH_|NEURON_(INDEX|FIND|APT)|UV_|.*TOKEN|.*SECRET", rest)
        ],
        "only BuildKit knows it": [rest for rest in runs if rest.startswith("--mount") or "<<" in rest],
    }
    return [rule for rule, broken in rules.items() if broken]
