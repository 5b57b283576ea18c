"""Checks one node for a run: file system, cores, memory, device and speed. `doctor` runs it as a task on every node."""

from __future__ import annotations

import fcntl
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from services.common.errors import DeviceError, StorageError
from services.common.hardware.image_platform import image_variant, require_backend
from services.common.hardware.instance_types import MIB
from services.common.program.fingerprint import program_facts
from services.common.recipe.derived import causal_flops_per_token, tokens_per_step
from services.common.recipe.memory_estimate import checkpoint_bytes, memory_of_worker, show_size
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.checkpoints.retention import most_checkpoints
from services.trainer.inspection.accelerators import check_gpus, check_neuron_cores
from services.trainer.inspection.findings import Finding, ok, problem, run_check, warning
from services.trainer.inspection.gemm_peak import measure_gemm_peak

PROBE_BYTES = 64 * MIB
BLOCK_BYTES = 4 * MIB
FSYNCS = 9
SLOW_FSYNC_SECONDS = 0.25
"""A commit waits for several fsyncs. NFS and Lustre take a few milliseconds for one."""
RAY_SHARED_BYTES = 128 * MIB
GPU_SECONDS = 0.3
"""Seconds for which each GPU of a node multiplies: they take turns, and a node may have eight."""
VOLATILE = {
    "tmpfs": "memory: its files are lost with the machine",
    "ramfs": "memory: its files are lost with the machine",
    "overlay": "a container's own layer: its files are lost with the container",
}
_CGROUP = Path("/sys/fs/cgroup")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class NodeRequirements:
    """What a run asks of each of its nodes."""

    recipe: Recipe
    root: Path
    launch: str
    workers: int
    """Number of workers on the node."""
    cache_bytes: int
    """Size of the compile cache, which the node copies."""
    checkpoints: int
    """Number of checkpoints the run has."""
    shared: Path | None
    """A path below the root that the command's node has, so every node must have it; None if there is none yet."""


class NodeReport(NamedTuple):
    findings: list[Finding]
    fingerprint: str
    """Fingerprint of the program on this node; empty if the node lacks its device or backend."""
    gemm_flops_per_second: float
    """Measured speed of matrix products; 0 if it was not measured."""


def check_node(requirements: NodeRequirements) -> NodeReport:
    return _NodeCheck(requirements).run()


def existing_place(path: Path) -> Path:
    """Return `path` or the nearest existing folder above it, on whose file system `path` will be made."""
    return next(place for place in (path, *path.parents) if place.exists())


class _NodeCheck:
    def __init__(self, requirements: NodeRequirements) -> None:
        self._wanted, self._recipe = requirements, requirements.recipe
        self._threads = requirements.workers * self._recipe.parallel.threads_per_worker
        self._fingerprint, self._flops_per_second = "", 0.0

    def run(self) -> NodeReport:
        device = self._recipe.parallel.device
        elsewhere = "pass a --root that this user can write to, with space"
        platform = "python -m services.common.hardware.image_platform"
        findings = [
            *run_check("file system", self._file_system, elsewhere),
            *run_check("disk space", self._disk_space, elsewhere),
            *run_check("node-local folder", self._local_folder, "set TMPDIR to another folder"),
            *run_check("CPU cores", self._cpu_cores, "lower parallel.threads_per_worker"),
            *run_check("memory", self._memory, "`plan` shows what uses the memory"),
            *run_check("network", self._network, "ulimit -l unlimited"),
        ]
        workers = self._wanted.workers
        if device == "cuda":
            findings += run_check("GPUs", lambda: check_gpus(self._recipe, workers), "run nvidia-smi")
        elif device != "cpu":
            findings += run_check("NeuronCores", lambda: check_neuron_cores(self._recipe, workers), "run neuron-ls")
        findings += run_check("device", self._device, f"{platform} shows this node's devices")
        findings += run_check("matrix products", self._matrix_products, "find other processes on this node")
        return NodeReport(findings, self._fingerprint, self._flops_per_second)

    def _file_system(self) -> Iterator[Finding]:
        check, root, shared = "file system", self._wanted.root, self._wanted.shared
        if shared and not shared.exists():
            seen = f"{shared}: missing here, but the command's node has it: {root} is another file system"
            yield problem(check, StorageError(seen), "mount the same volume on every node of the stage")
            return
        place = existing_place(root)
        mounts = [each for each in psutil.disk_partitions(all=True) if place.resolve().is_relative_to(each.mountpoint)]
        mount = max(mounts, key=lambda each: len(each.mountpoint), default=None)
        require_commits(place)
        fsync_seconds, write_speed, read_speed = measure_speed(place, max(MIB, min(PROBE_BYTES, _free(place) // 8)))
        seen = f"{mount.fstype} at {mount.mountpoint}" if mount else str(place)
        seen += ", renames and locks work" + ("" if place == root else f"; {root} does not exist yet")
        if mount and mount.fstype in VOLATILE:
            yield warning(check, f"{seen}; {VOLATILE[mount.fstype]}", "pass a --root on a disk or a volume")
        else:
            yield ok(check, seen)
        size = checkpoint_bytes(self._recipe)
        speed = (
            f"fsync {fsync_seconds * 1000:,.2f} ms, write {write_speed / 1e6:,.0f} MB/s, read "
            f"{read_speed / 1e6:,.0f} MB/s: a checkpoint of {show_size(size)} takes {size / write_speed:,.1f} s"
        )
        if fsync_seconds > SLOW_FSYNC_SECONDS:
            yield warning("disk speed", speed, "find what else writes there: each commit waits for several fsyncs")
        else:
            yield ok("disk speed", speed)

    def _disk_space(self) -> Iterator[Finding]:
        check, place, policy = "disk space", existing_place(self._wanted.root), self._recipe.checkpoint
        size, free = checkpoint_bytes(self._recipe), _free(place)
        count = max(2, most_checkpoints(self._recipe) - self._wanted.checkpoints)
        seen = f"{show_size(free)} free at {place}, {count} checkpoints take {show_size(count * size)}"
        kept = self._recipe.train.max_steps // policy.keep_interval_steps if policy.keep_interval_steps else 0
        if count * size > free:
            yield problem(check, StorageError(seen), "free some space, or pass a --root with more")
        elif kept * size > free:
            seen += f"; the {kept:,} that are kept permanently take {show_size(kept * size)}"
            yield warning(check, seen, "raise checkpoint.keep_interval_steps")
        else:
            yield ok(check, seen)

    def _local_folder(self) -> Iterator[Finding]:
        check, place, needed = "node-local folder", Path(tempfile.gettempdir()), self._wanted.cache_bytes
        seen = f"{place}: {show_size(_free(place))} free, the copy of the compile cache takes {show_size(needed)}"
        if needed > _free(place):
            yield problem(check, StorageError(seen), "free some space there, or set TMPDIR to a folder with more")
        elif self._recipe.compile.enabled and os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
            seen = f"{place}: mounted noexec, but compiled graphs are executed from there"
            yield problem(check, StorageError(seen), "set TMPDIR to a folder on a mount without noexec")
        else:
            yield ok(check, seen)

    def _cpu_cores(self) -> Iterator[Finding]:
        cores, workers = num_cores(), self._wanted.workers
        seen = f"{cores:g}; {workers} workers of {self._recipe.parallel.threads_per_worker} threads take "
        if self._threads > cores:
            fewer = f"--parallel.threads_per_worker={max(1, int(cores // workers))}, or fewer workers on a node"
            yield warning("CPU cores", f"{seen}{self._threads}, so they wait for each other in every step", fewer)
        else:
            yield ok("CPU cores", f"{seen}{self._threads}")

    def _memory(self) -> Iterator[Finding]:
        memory, workers = psutil.virtual_memory(), self._wanted.workers
        total, available = memory.total, memory.available
        limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
        if limit.isdigit() and used.isdigit():
            total, available = min(total, int(limit)), min(available, max(0, int(limit) - int(used)))
        seen = f"{show_size(available)} of {show_size(total)} available"
        if self._recipe.parallel.device != "cpu":
            yield ok("memory", f"{seen}; the device has its own")
            return
        needed = workers * memory_of_worker(self._recipe).peak_bytes
        seen = f"{seen}; {workers} workers take {show_size(needed)} at their peak, libraries not counted"
        if needed > total:
            fewer = "lower batch.micro_batch_size, or use fewer workers on a node; `plan` shows what uses the memory"
            yield problem("memory", DeviceError(seen), fewer)
        elif needed > available:
            yield warning("memory", seen, "end other processes on this node")
        else:
            yield ok("memory", seen)

    def _network(self) -> Iterator[Finding]:
        """Check what Ray's object store and EFA need of the container."""
        shared = Path("/dev/shm")  # nosec B108 # only measured
        if self._wanted.launch == "ray" and shared.is_dir():
            seen = (
                f"{show_size(_free(shared))} free in {shared}, Ray's object store takes {show_size(RAY_SHARED_BYTES)}"
            )
            if _free(shared) < RAY_SHARED_BYTES:
                yield warning("shared memory", seen, "start the container with --shm-size=256m")
            else:
                yield ok("shared memory", seen)
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if _INFINIBAND.is_dir() and locked != resource.RLIM_INFINITY:
            yield warning("network", f"EFA may lock {show_size(locked)} of memory alone", "ulimit -l unlimited")

    def _device(self) -> Iterator[Finding]:
        require_backend(self._recipe.parallel.device)
        facts = program_facts(self._recipe)
        self._fingerprint = fingerprint(facts)
        versions = {name: facts[name] for name in ("torch", "cuda", "triton", "cxx") if name in facts}
        shown = ", ".join(f"{name} {found}" for name, found in {**versions, **facts.get("libraries", {})}.items())
        yield ok("device", f"{self._recipe.parallel.device} on {facts['machine']}, variant {image_variant()}, {shown}")

    def _matrix_products(self) -> Iterator[Finding]:
        recipe, workers, check = self._recipe, self._wanted.workers, "matrix products"
        dtype, device = recipe.train.dtype, recipe.parallel.device
        if device == "cuda":
            gpus = range(min(workers, torch.cuda.device_count()))
            speeds = [measure_gemm_peak(dtype, 1, GPU_SECONDS, f"cuda:{number}") for number in gpus]
            what = f"{len(speeds)} GPUs, as fast as the slowest"
        else:
            threads = max(1, min(self._threads, int(num_cores())))
            speeds = [measure_gemm_peak(dtype, threads)] if device == "cpu" else []
            what = f"{threads} threads"
        if not speeds:
            yield ok(check, f"not measured: the device is {device}")
            return
        self._flops_per_second = len(speeds) * min(speeds)
        nodes = recipe.parallel.num_workers / workers
        seconds = causal_flops_per_token(recipe) * tokens_per_step(recipe) / nodes / self._flops_per_second
        speed = f"{self._flops_per_second / 1e9:,.0f} GFLOP/s in {dtype} with {what}"
        yield ok(check, f"{speed}, at which a step takes {seconds:,.3f} s")


def require_commits(place: Path) -> None:
    """Raise `StorageError` unless renames and locks below `place` work as commits and runs need."""
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=place) as name:
        full, other = Path(name, "full"), Path(name, "other")
        for folder in (full, other):
            folder.mkdir()
            (folder / "file").write_bytes(b"\0" * 4096)
        with (full / "file").open("r+b") as held, (full / "file").open("r+b") as second:  # NFS locks no reader
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise _unfit(place, "two processes can hold one lock")
            except BlockingIOError:
                pass
        try:
            other.rename(full)
        except OSError:
            return
        raise _unfit(place, "a rename replaces a folder that has files in it")


def _unfit(place: Path, what: str) -> StorageError:
    return StorageError(f"{place}: {what}. Pass a --root on a POSIX file system, such as ext4, XFS, NFS, Lustre.")


def measure_speed(place: Path, num_bytes: int) -> tuple[float, float, float]:
    """Return the seconds of an fsync, and the bytes per second of writing and of reading a file of `num_bytes`.

    The kernel drops the file from its cache before it is read; a file server may still cache it.
    """
    block, synced = os.urandom(min(BLOCK_BYTES, num_bytes)), []  # some file systems compress
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        for _ in range(FSYNCS):
            started = time.perf_counter()
            file.write(block[:4096])
            os.fsync(file.fileno())
            synced.append(time.perf_counter() - started)
        started, written = time.perf_counter(), 0
        while written < num_bytes:
            written += file.write(block)
        os.fsync(file.fileno())
        write_seconds = time.perf_counter() - started
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(BLOCK_BYTES):
            pass
        read_seconds = time.perf_counter() - started
    return statistics.median(synced), written / write_seconds, written / read_seconds


def num_cores() -> float:
    """Return the number of cores that this process may use, or less if its control group has a smaller quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def _free(place: Path) -> int:
    return psutil.disk_usage(str(place)).free


def _read(path: Path) -> str:
    """Return the line of a control group's file; empty where the kernel has none."""
    return path.read_text(encoding="ascii").strip() if path.exists() else ""
