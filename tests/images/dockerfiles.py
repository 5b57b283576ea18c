"""What a Dockerfile of ours keeps to, as functions that return what breaks it; hadolint's rules where it has one."""

from __future__ import annotations

import re

Instruction = tuple[str, str]


def instructions_of(text: str) -> list[Instruction]:
    """Name and arguments of each instruction, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def breaches_of(text: str) -> list[str]:
    """One sentence per rule that the Dockerfile breaks."""
    instructions = instructions_of(text)
    last_stage = instructions[max(number for number, (name, _) in enumerate(instructions) if name == "FROM") :]
    runs = [rest for name, rest in instructions if name == "RUN"]
    values = {
        rest.partition("=")[0]: rest.partition("=")[2] for name, rest in instructions if name == "ARG" and "=" in rest
    }
    bases = [_resolved(rest.split()[0], values) for name, rest in instructions if name == "FROM"]
    stages = {rest.split()[-1] for name, rest in instructions if name == "FROM" and " AS " in rest}
    users = [rest for name, rest in last_stage if name == "USER"]
    outside = {name for name, rest in last_stage if name == "ARG" and re.match(r"PIP_|TORCH_|.*TOKEN|.*SECRET", rest)}
    rules = {
        "a base has no tag, or latest (DL3006, DL3007)": [
            base for base in bases if base not in stages and (":" not in base or base.endswith(":latest"))
        ],
        "the last user is not a fixed, unprivileged uid (DL3002)": []
        if users and re.match(r"[1-9]", users[-1])
        else [0],
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
        "the last stage takes an index setting or a secret, and its history would show it": sorted(outside),
        "only BuildKit knows it": [rest for rest in runs if rest.startswith("--mount") or "<<" in rest],
    }
    return [rule for rule, broken in rules.items() if broken]


def _resolved(base: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ""), base)
