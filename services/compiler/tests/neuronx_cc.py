"""A stand-in for neuronx-cc: its command line, a file like a NEFF, and on request the real compiler's failures.

`install(folder)` writes the program to a folder for PATH. It reads its behaviour from `behaviour.json` beside itself,
and every compilation adds a line to `calls.jsonl` there.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = "2.24.8799.0+6f62ff7c"
HANG_SECONDS = 3_600.0


def install(folder: Path, version: str = VERSION) -> Path:
    """Write the program `folder/neuronx-cc`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-S", str(Path(__file__).absolute()), str(folder), version]
    script = folder / "neuronx-cc"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    behave(folder)
    return folder


def behave(folder: Path, **modules: str) -> None:
    """Set the failure of all graphs whose name contains a key. Other graphs compile.

    `hang`, `killed` (by signal 9), `busy` (exit 70), `part-killed` (70, as when a child process was killed),
    `broken` (exit 1), `full` (disk), `garbage`, `cut`, `nothing`. With `-once`: in the first compilation only.
    """
    partial = folder / "behaviour.partial"
    partial.write_text(json.dumps(modules), encoding="utf-8")
    partial.rename(folder / "behaviour.json")


def read_calls(folder: Path) -> list[dict[str, Any]]:
    """Return `module` and `flags` of all compilations, in the order of their starts."""
    calls = folder / "calls.jsonl"
    return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def main(folder: Path, version: str, arguments: list[str]) -> int:
    if "--version" in arguments:
        print(f"NeuronX Compiler version {version}\n\nPython version 3.12.3\nNumPy version 1.26.4", file=sys.stderr)
        return 0
    command, framework, graph, output, neff, *flags = arguments
    if (command, framework, output) != ("compile", "--framework=XLA", "--output"):
        print(f"neuronx-cc: error: unrecognized arguments: {arguments}", file=sys.stderr)
        return 2
    if not any(flag.startswith("--target") for flag in flags):
        print("neuronx-cc: error: the following arguments are required: --target", file=sys.stderr)
        return 2
    found = re.search(r"MODULE_[\w+-]+", Path(graph).name)
    module = found.group() if found else graph
    content = Path(graph).read_bytes()
    digest = hashlib.sha256(content + json.dumps(flags).encode()).hexdigest()
    number = _count_call(folder, {"module": module, "flags": flags})
    for key, behaviour in json.loads((folder / "behaviour.json").read_text(encoding="utf-8")).items():
        if key in module and (number == 1 or not behaviour.endswith("-once")):
            return _misbehave(behaviour.removesuffix("-once"), Path(neff), digest)
    Path(neff).write_bytes(make_neff(digest))
    print("Compiler status PASS")
    return 0


def make_neff(digest: str) -> bytes:
    """Return the bytes of a NEFF: a header, and a compressed payload that depends on the digest."""
    payload = gzip.compress(hashlib.shake_256(digest.encode()).digest(4096), mtime=0)
    header = struct.pack("<5Q128s", 2, 1024, len(payload), 2, 0, b"stand-in")
    return header.ljust(1024, b"\0") + payload


def _count_call(folder: Path, call: dict[str, Any]) -> int:
    """Record a compilation; returns the number of compilations of its module so far."""
    with (folder / "calls.jsonl").open("a+", encoding="utf-8") as calls:
        fcntl.flock(calls, fcntl.LOCK_EX)
        calls.write(json.dumps(call) + "\n")
        calls.flush()
        calls.seek(0)
        return sum(json.loads(line)["module"] == call["module"] for line in calls)


FAILURES = {
    "busy": (70, "neuronx-cc: internal error: resource temporarily unavailable"),
    "part-killed": (70, "[F137] neuronx-cc was forcibly killed - most commonly due to insufficient system memory."),
    "broken": (1, "\n".join([*(f"line {n}" for n in range(40)), "[DVR002] Internal transformation failed"])),
    "full": (1, "OSError: [Errno 28] No space left on device"),
}
"""Exit code and output of the compiler's failures."""


def _misbehave(behaviour: str, neff: Path, digest: str) -> int:
    if behaviour in FAILURES:
        exit_code, output = FAILURES[behaviour]
        print(output)
        return exit_code
    if behaviour == "hang":
        subprocess.run(["sleep", str(HANG_SECONDS)], check=False)  # the real compiler has child processes, too
    elif behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour != "nothing":
        neff.write_bytes({"garbage": b"\x7fELF" * 1000, "cut": make_neff(digest)[:-100]}[behaviour])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
