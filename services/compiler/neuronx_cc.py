"""The task that a worker runs: neuronx-cc makes one NEFF of one graph.

A task works in a folder of its own on its node's disk. What it made it puts beside what other tasks made in one step,
and says so in a record, last: a graph whose record and files agree is not compiled again.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import struct
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import Count, ManifestModel, Xxh3, sync_folder, write_durably
from services.common.errors import DeviceError, StorageError
from services.common.hardware.instance_types import family_of
from services.common.input.files import read_file
from services.common.process.private_folder import new_name, private_folder
from services.common.recipe.schema import Recipe
from services.compiler.child_process_group import run_in_group
from services.compiler.modules import DONE, FLAGS, GRAPH, NEFF, Module

COMPILER = "neuronx-cc"
NO_COMPILER = "absent"
"""Version that graphs are said to be for which were traced where there is no neuronx-cc."""
TARGETS = ("trn1", "trn1n", "trn2")
TEMPORARY_SUFFIX = ".tmp"
LOG_LINES = 12
VERSION_SECONDS = 120.0

_VERSION = re.compile(r"NeuronX Compiler version (\S+)")
_EXIT_KILLED = 137  # also how a container ends a process that took more memory than it may
_KILLED_PART = re.compile(r"\[F137\]|forcibly killed")
"""What neuronx-cc says when one of its own processes was killed so, and it ends with 70 itself."""
_EXIT_TRANSIENT = 70
"""Seen of many compilations at once; also how neuronx-cc ends by an error of its own, so it is retried a few times."""

# Of a NEFF: package version, size of the header and of what follows, and the format's major version; no magic number.
_NEFF_HEADER = struct.Struct("<4Q")
_NEFF_HEADER_BYTES = 1024
_NEFF_PACKAGES = (1, 2)
_NEFF_MAJOR_VERSION = 2

Outcome = Literal["compiled", "killed", "transient", "failed"]


@dataclass(frozen=True)
class CompileTask:
    module: Module
    """As a trace left it."""
    compiled: Path
    """The folder of what is compiled, on the shared file system."""
    target: str
    timeout_seconds: float
    num_cpus: int
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
        """Of the attempt that failed."""
        return self.folder.with_name(f"{self.module.name}.log")

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of the graph, which are part of its key, and the target, which they may have already."""
        has_target = any(flag == "--target" or flag.startswith("--target=") for flag in self.module.flags)
        return self.module.flags if has_target else (*self.module.flags, f"--target={self.target}")


class CompiledModule(ManifestModel):
    """What is known of a graph that was compiled, and what it took."""

    name: str
    compiler: str
    flags: tuple[str, ...]
    """All that neuronx-cc was given."""
    graph_bytes: Count
    graph_xxh3_128: Xxh3
    neff_bytes: Count
    neff_xxh3_128: Xxh3
    seconds: float
    """Of the attempt that succeeded, with one node's `num_cpus`."""
    num_cpus: int
    memory_gib: float
    attempts: int


@dataclass(frozen=True)
class CompileResult:
    outcome: Outcome
    reason: str = ""
    """Of one that is not compiled."""
    log: str = ""
    """Its last lines."""
    record: CompiledModule | None = None


def compile_module(task: CompileTask) -> CompileResult:
    """Compile one graph; what went wrong with it is a result. Raises `DeviceError` where there is no neuronx-cc, or
    another one than the graph was traced for; `StorageError` when the node's disk is full.
    """
    require_compiler(task.module.compiler)
    with private_folder(new_name("neuronx-cc")) as scratch:
        # libneuronxla's names: an error of the compiler's, and the shim of a trainer, tell the graph by its file.
        graph, neff = (scratch / f"model.{task.module.name}.{ending}" for ending in ("hlo_module.pb", "neff"))
        shutil.copyfile(task.module.folder / GRAPH, graph)
        shutil.copyfile(task.module.folder / FLAGS, scratch / FLAGS)
        command = [COMPILER, "compile", "--framework=XLA", str(graph), "--output", str(neff), *task.flags]
        started = time.monotonic()
        environment = {**os.environ, "TMPDIR": str(scratch)}
        exit_code = run_in_group(command, scratch, scratch / "log.txt", task.timeout_seconds, environment)
        seconds = time.monotonic() - started
        log = (scratch / "log.txt").read_text(encoding="utf-8", errors="replace")
        outcome, reason = _judge(task, exit_code, log, neff)
        if outcome != "compiled":
            task.log_path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(task.log_path, log.encode())
            return CompileResult(outcome, reason, "\n".join(log.strip().splitlines()[-LOG_LINES:]))
        record = CompiledModule(
            name=task.module.name,
            compiler=task.module.compiler,
            flags=task.flags,
            graph_bytes=graph.stat().st_size,
            graph_xxh3_128=xxh3_of(graph),
            neff_bytes=neff.stat().st_size,
            neff_xxh3_128=xxh3_of(neff),
            seconds=round(seconds, 3),
            num_cpus=task.num_cpus,
            memory_gib=task.memory_gib,
            attempts=task.attempt,
        )
        _keep(task, neff, record)
    return CompileResult("compiled", record=record)


def find_compiled(task: CompileTask) -> CompiledModule | None:
    """The record of a graph that an earlier task compiled, with these flags, if its files are still what it says."""
    try:
        record = CompiledModule.model_validate_json(read_file(task.record_path))
        neff = task.folder / NEFF
        agrees = (
            (record.name, record.compiler, record.flags) == (task.module.name, task.module.compiler, task.flags)
            and record.graph_xxh3_128 == xxh3_of(task.module.folder / GRAPH)
            and (task.folder / DONE).is_file()
            and (record.neff_bytes, record.neff_xxh3_128) == (neff.stat().st_size, xxh3_of(neff))
        )
    except (FileNotFoundError, ValidationError):
        return None
    return record if agrees else None


def target_of(recipe: Recipe) -> str:
    """neuronx-cc's `--target`: the family of the nodes that train."""
    family = family_of(recipe.cluster.trainer_instance_type)
    if family not in TARGETS:
        raise DeviceError(f"neuronx-cc has no target for {family}; expected one of {', '.join(TARGETS)}.")
    return family


def require_compiler(version: str) -> None:
    """Raise `DeviceError` unless the neuronx-cc on PATH is of this version."""
    found = compiler_version()
    if found != version:
        raise DeviceError(
            f"the graphs were traced for {COMPILER} {version}, and {shutil.which(COMPILER)} on this node is {found}: "
            f"what it compiles no trainer would find. Trace and compile with the same image: make images "
            f"STAGE=compiler VARIANT=neuron"
        )


def compiler_version() -> str:
    """Of the neuronx-cc on PATH. Raises `DeviceError` where there is none."""
    return _ask_version(os.environ.get("PATH", ""))


def compiler_version_if_any() -> str:
    """Version of the neuronx-cc on PATH; `NO_COMPILER` where there is none: graphs are traced there, not compiled."""
    return compiler_version() if shutil.which(COMPILER) else NO_COMPILER


@functools.cache
def _ask_version(path: str) -> str:
    """It takes seconds to answer."""
    if shutil.which(COMPILER, path=path) is None:
        raise DeviceError(
            f"there is no {COMPILER} on PATH. A neuron image brings it, on nodes without a Neuron device too: "
            f"make images STAGE=compiler VARIANT=neuron"
        )
    try:
        command = [COMPILER, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"`{COMPILER} --version` has not answered for {VERSION_SECONDS:.0f} s.") from error
    printed = done.stdout + done.stderr
    found = _VERSION.search(printed)
    if found is None:
        raise DeviceError(f"`{COMPILER} --version` names no version: {printed.strip()[-500:]!r}")
    return found.group(1)


def _judge(task: CompileTask, exit_code: int | None, log: str, neff: Path) -> tuple[Outcome, str]:
    if exit_code is None:
        return "failed", f"took longer than compile.task_timeout_seconds, {task.timeout_seconds:g} s, and was ended"
    if exit_code == _EXIT_KILLED or (exit_code and _KILLED_PART.search(log)):
        had = f"the task had asked for {task.memory_gib:g} GiB; see compile.task_memory_gib"
        return "killed", f"{COMPILER} was killed, most likely for memory: {had}"
    if exit_code and "No space left on device" in log:
        raise StorageError(
            f"{neff.parent}: the node's disk filled up while {task.module.name} was compiled "
            f"({shutil.disk_usage(neff.parent).free:,} bytes free). Free some space, or set TMPDIR to a folder on "
            f"another disk; the same command compiles what is missing."
        )
    if exit_code == _EXIT_TRANSIENT:
        return "transient", f"{COMPILER} ended with {exit_code}"
    if exit_code:
        return "failed", f"{COMPILER} ended with {exit_code}"
    damage = find_damage(neff)
    return ("failed", f"{COMPILER} ended with 0, and its output {damage}") if damage else ("compiled", "")


def find_damage(neff: Path) -> str:
    """Why this cannot be a NEFF, by its header, as the Neuron runtime knows one; nothing for a sane one."""
    try:
        size = neff.stat().st_size
        with neff.open("rb") as file:
            header = file.read(_NEFF_HEADER.size)
    except FileNotFoundError:
        return "is missing"
    if size == 0:
        return "is empty"
    if size <= _NEFF_HEADER_BYTES:
        return f"is no NEFF: {size:,} bytes, and its header alone has {_NEFF_HEADER_BYTES:,}"
    package, header_bytes, data_bytes, major = _NEFF_HEADER.unpack(header)
    if package not in _NEFF_PACKAGES or header_bytes >= size or major > _NEFF_MAJOR_VERSION:
        return f"is no NEFF: it begins with {header[:16].hex(' ')}"
    if data_bytes > size - _NEFF_HEADER_BYTES:
        return f"is cut off: {size:,} bytes, of {data_bytes + _NEFF_HEADER_BYTES:,}"
    return ""


def _keep(task: CompileTask, neff: Path, record: CompiledModule) -> None:
    """Put what was compiled in its place: whole or not at all, and believed only once its record is there."""
    task.folder.mkdir(parents=True, exist_ok=True)
    temporary = task.folder / f".{NEFF}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        with temporary.open("wb") as target, neff.open("rb") as source:
            shutil.copyfileobj(source, target, 4 * 2**20)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(task.folder / NEFF)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(task.folder)
    write_durably(task.folder / DONE, b"")
    write_durably(task.record_path, json.dumps(record.model_dump(mode="json"), indent=1).encode())
    task.log_path.unlink(missing_ok=True)
