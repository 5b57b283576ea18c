"""Compiles one graph with neuronx-cc, as a worker's task.

A task works in a temporary folder on its node's disk, then renames the NEFF into the shared folder of compiled graphs,
and writes the graph's record last. A graph whose record matches its files is not compiled again.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import Count, ManifestModel, Xxh3, write_durably
from services.common.errors import DeviceError, StorageError
from services.common.recipe.compilation import Compile
from services.compiler.child_process_group import run_in_group
from services.compiler.modules import DONE, FLAGS, GRAPH, NEFF, Module

COMPILER = "neuronx-cc"
NO_COMPILER = "absent"
"""Compiler version of graphs that were traced where neuronx-cc is not installed."""
LOG_LINES = 12

_VERSION = re.compile(r"NeuronX Compiler version (\S+)")
_EXIT_KILLED = 137  # SIGKILL, the way in which a container enforces its memory limit
_KILLED_PART = re.compile(r"\[F137\]|forcibly killed")
"""Output of neuronx-cc when one of its own processes was killed; neuronx-cc itself then ends with 70."""
_EXIT_TRANSIENT = 70
"""Exit code when many compilations run at once, and of internal errors of neuronx-cc too: retried a few times."""

_NEFF_HEADER = struct.Struct("<4Q")
"""Start of a NEFF: package version, bytes of header, bytes of data, major version of the format. No magic number."""
_NEFF_HEADER_BYTES = 1024

Outcome = Literal["compiled", "killed", "lost", "transient", "failed"]


@dataclass(frozen=True)
class CompileTask:
    module: Module
    """Graph in the cache that the trace filled."""
    compiled: Path
    """Folder for compiled graphs on the shared file system."""
    settings: Compile
    memory_gib: float
    attempt: int = 1

    @property
    def folder(self) -> Path:
        return self.compiled / self.module.path

    @property
    def record_path(self) -> Path:
        return self.folder.with_name(f"{self.module.name}.json")

    @property
    def log_path(self) -> Path:
        """Log of the last failed attempt."""
        return self.folder.with_name(f"{self.module.name}.log")


class CompiledModule(ManifestModel):
    """Record of a compiled graph: identity, checksums, and the resources that compiling it took."""

    name: str
    compiler: str
    flags: tuple[str, ...]
    graph_bytes: Count
    graph_xxh3_128: Xxh3
    neff_bytes: Count
    neff_xxh3_128: Xxh3
    seconds: float
    """Seconds of the successful attempt, with `num_cpus` CPUs."""
    num_cpus: int
    memory_gib: float
    attempts: int


@dataclass(frozen=True)
class CompileResult:
    outcome: Outcome
    reason: str = ""
    """Why the graph did not compile; empty where it did."""
    log: str = ""
    """Last lines of neuronx-cc's output; empty where the graph compiled."""
    record: CompiledModule | None = None


def compile_module(task: CompileTask) -> CompileResult:
    """Compile one graph. A graph that does not compile is a result, not an error.

    Raises `DeviceError` where neuronx-cc is missing or of another version than the graph was traced for, and
    `StorageError` when the node's disk is full.
    """
    require_compiler(task.module.compiler)
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        scratch = Path(folder)
        # libneuronxla's file names: errors of the compiler, and the shim of a trainer, identify a graph by them.
        graph, neff = (scratch / f"model.{task.module.name}.{ending}" for ending in ("hlo_module.pb", "neff"))
        shutil.copyfile(task.module.folder / GRAPH, graph)
        shutil.copyfile(task.module.folder / FLAGS, scratch / FLAGS)
        command = [COMPILER, "compile", "--framework=XLA", str(graph), "--output", str(neff), *task.module.flags]
        started = time.monotonic()
        environment = {**os.environ, "TMPDIR": folder}
        exit_code = run_in_group(command, scratch, scratch / "log.txt", task.settings.task_timeout_seconds, environment)
        seconds = time.monotonic() - started
        log = (scratch / "log.txt").read_text(encoding="utf-8", errors="replace")
        outcome, reason = _judge(task, exit_code, log, neff)
        if outcome != "compiled":
            task.log_path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(task.log_path, log.encode())
            return CompileResult(outcome, reason, "\n".join(log.strip().splitlines()[-LOG_LINES:]))
        task.folder.mkdir(parents=True, exist_ok=True)
        write_durably(task.folder / NEFF, neff.read_bytes())
        write_durably(task.folder / DONE, b"")
        record = CompiledModule(
            name=task.module.name,
            compiler=task.module.compiler,
            flags=task.module.flags,
            graph_bytes=graph.stat().st_size,
            graph_xxh3_128=xxh3_of(graph),
            neff_bytes=neff.stat().st_size,
            neff_xxh3_128=xxh3_of(neff),
            seconds=round(seconds, 3),
            num_cpus=task.settings.task_cpus,
            memory_gib=task.memory_gib,
            attempts=task.attempt,
        )
    write_durably(task.record_path, json.dumps(record.model_dump(mode="json"), indent=1).encode())
    task.log_path.unlink(missing_ok=True)
    return CompileResult("compiled", record=record)


def find_compiled(task: CompileTask) -> CompiledModule | None:
    """Return the record of an earlier task for the same graph and flags; None if there is none, or its files differ."""
    try:
        record = CompiledModule.model_validate_json(task.record_path.read_bytes())
        neff = task.folder / NEFF
        agrees = (
            (record.name, record.compiler, record.flags) == (task.module.name, task.module.compiler, task.module.flags)
            and record.graph_xxh3_128 == xxh3_of(task.module.folder / GRAPH)
            and (task.folder / DONE).is_file()
            and (record.neff_bytes, record.neff_xxh3_128) == (neff.stat().st_size, xxh3_of(neff))
        )
    except (FileNotFoundError, ValidationError):
        return None
    return record if agrees else None


def require_compiler(version: str) -> None:
    """Raise `DeviceError` unless the neuronx-cc on PATH is of this version."""
    found = compiler_version()
    if found != version:
        raise DeviceError(
            f"the graphs were traced for {COMPILER} {version}, but {shutil.which(COMPILER)} on this node is {found}; "
            f"no trainer would find its output. Trace and compile with the same image: make images STAGE=compiler "
            f"VARIANT=neuron"
        )


def compiler_version() -> str:
    """Return the version of the neuronx-cc on PATH. Raises `DeviceError` where there is none."""
    return _ask_version(os.environ.get("PATH", ""))


@functools.cache
def _ask_version(path: str) -> str:
    """Ask neuronx-cc for its version, which takes seconds: once per process and PATH."""
    if shutil.which(COMPILER, path=path) is None:
        raise DeviceError(
            f"there is no {COMPILER} on PATH. The compiler's neuron image has it, and runs on nodes without a Neuron "
            f"device too: make images STAGE=compiler VARIANT=neuron"
        )
    done = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    found = _VERSION.search(printed)
    if found is None:
        raise DeviceError(
            f"`{COMPILER} --version`: expected 'NeuronX Compiler version ...', got {printed.strip()[-500:]!r}"
        )
    return found.group(1)


def _judge(task: CompileTask, exit_code: int | None, log: str, neff: Path) -> tuple[Outcome, str]:
    if exit_code is None:
        limit = f"compile.task_timeout_seconds = {task.settings.task_timeout_seconds:g}"
        return "failed", f"took longer than {limit}, and was killed"
    if exit_code == _EXIT_KILLED or (exit_code and _KILLED_PART.search(log)):
        had = f"the task had requested {task.memory_gib:g} GiB; see compile.task_memory_gib"
        return "killed", f"{COMPILER} was killed, most likely for lack of memory: {had}"
    if exit_code and "No space left on device" in log:
        raise StorageError(
            f"{neff.parent}: the node's disk filled up while {task.module.name} was compiled "
            f"({shutil.disk_usage(neff.parent).free:,} bytes free). Free some space, or set TMPDIR to a folder on "
            f"another disk; the same command compiles what is missing."
        )
    if exit_code:
        return "transient" if exit_code == _EXIT_TRANSIENT else "failed", f"{COMPILER} ended with {exit_code}"
    if not is_neff(neff):
        return "failed", f"{COMPILER} ended with 0, but its output is missing, cut off or no NEFF"
    return "compiled", ""


def is_neff(path: Path) -> bool:
    """Check a NEFF's header as the Neuron runtime does."""
    content = path.read_bytes() if path.exists() else b""
    if len(content) <= _NEFF_HEADER_BYTES:
        return False
    package, header_bytes, data_bytes, major = _NEFF_HEADER.unpack_from(content)
    is_known = package in (1, 2) and major <= 2
    return is_known and header_bytes < len(content) and data_bytes <= len(content) - _NEFF_HEADER_BYTES
