"""Checks one node for a run: file system, cores, memory, device and speed. `doctor` runs it as a task on every node."""

from __future__ import annotations

import fcntl
import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from services.common.errors import DeviceError, StorageError
from services.common.hardware.gpus import VISIBLE_VARIABLE
from services.common.hardware.image_platform import NEURON_DEVICES, image_variant, neuron_chips, require_backend
from services.common.hardware.instance_types import MIB
from services.common.program.fingerprint import program_facts
from services.common.recipe.derived import causal_flops_per_token, instance_type, tokens_per_step
from services.common.recipe.memory_estimate import checkpoint_bytes, memory_of_worker, show_size
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.checkpoints.retention import most_checkpoints
from services.trainer.inspection.findings import Finding, ok, problem, run_check, warning
from services.trainer.inspection.gemm_peak import measure_gemm_peak

PROBE_BYTES, BLOCK_BYTES, FSYNCS = 64 * MIB, 4 * MIB, 9
SLOW_FSYNC_SECONDS = 0.25
"""A commit waits for several fsyncs. NFS and Lustre take a few milliseconds for one."""
GPU_SECONDS = 0.3
"""Seconds for which each GPU of a node multiplies: they take turns, and a node may have eight."""
VOLATILE = ("tmpfs", "ramfs", "overlay")
"""File systems in memory, and of a container's own layer."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class NodeRequirements:
    """What a run asks of each of its nodes."""

    recipe: Recipe
    root: Path
    workers: int
    """Number of workers on the node."""
    cache_bytes: int
    """Size of the compile cache, which the node copies."""
    checkpoints: int
    """Number of checkpoints the run has."""
    shared: Path | None
    """A path below the root that the command's node has, so every node must have it; None if there is none yet."""


def check_node(wanted: NodeRequirements) -> list[Finding]:
    recipe, workers = wanted.recipe, wanted.workers
    elsewhere = "pass a --root that this user can write to, with space"
    platform = "python -m services.common.hardware.image_platform shows this node's devices"
    findings = [
        run_check("file system", lambda: check_file_system(wanted), elsewhere),
        run_check("disk speed", lambda: check_disk_speed(wanted), elsewhere),
        run_check("disk space", lambda: check_disk_space(wanted), elsewhere),
        run_check("node-local folder", lambda: check_local_folder(wanted), "set TMPDIR to another folder"),
        run_check("CPU cores", lambda: check_cpu_cores(recipe, workers), "lower parallel.threads_per_worker"),
        run_check("memory", lambda: check_memory(recipe, workers), "`plan` shows what uses the memory"),
    ]
    if recipe.parallel.device == "cuda":  # before this process takes some of their memory
        findings.append(run_check("GPUs", lambda: check_gpus(recipe, workers), "run nvidia-smi"))
    elif recipe.parallel.device != "cpu":
        findings.append(run_check("NeuronCores", lambda: check_neuron_cores(recipe, workers), "run neuron-ls"))
    return [
        *findings,
        run_check("device", lambda: check_device(recipe), platform),
        run_check("matrix products", lambda: check_matrix_products(recipe, workers), "end other processes"),
    ]


def existing_place(path: Path) -> Path:
    """Return `path` or the nearest existing folder above it, on whose file system `path` will be made."""
    return next(place for place in (path, *path.parents) if place.exists())


def check_file_system(wanted: NodeRequirements) -> Finding:
    root, shared = wanted.root, wanted.shared
    if shared and not shared.exists():
        seen = f"{shared}: missing here, but the command's node has it: {root} is another file system"
        return problem(StorageError(seen), "mount the same volume on every node of the stage")
    place = existing_place(root)
    require_commits(place)
    mounts = [each for each in psutil.disk_partitions(all=True) if place.resolve().is_relative_to(each.mountpoint)]
    mount = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    seen = f"{mount.fstype} at {mount.mountpoint}" if mount else str(place)
    seen += ", renames and locks work" + ("" if place == root else f"; {root} does not exist yet")
    if mount and mount.fstype in VOLATILE:
        return warning(f"{seen}; its files are lost with the machine or container", "pass a --root on a volume")
    return ok(seen)


def check_disk_speed(wanted: NodeRequirements) -> Finding:
    size, place = checkpoint_bytes(wanted.recipe), existing_place(wanted.root)
    fsync_seconds, write_speed, read_speed = measure_speed(place, max(MIB, min(PROBE_BYTES, _free(place) // 8)))
    seen = (
        f"fsync {fsync_seconds * 1000:,.2f} ms, write {write_speed / 1e6:,.0f} MB/s, read "
        f"{read_speed / 1e6:,.0f} MB/s: a checkpoint of {show_size(size)} takes {size / write_speed:,.1f} s"
    )
    if fsync_seconds > SLOW_FSYNC_SECONDS:
        return warning(seen, "find what else writes there: each commit waits for several fsyncs")
    return ok(seen)


def check_disk_space(wanted: NodeRequirements) -> Finding:
    place, every = existing_place(wanted.root), wanted.recipe.checkpoint.keep_interval_steps
    size, free = checkpoint_bytes(wanted.recipe), _free(place)
    count = max(2, most_checkpoints(wanted.recipe) - wanted.checkpoints)
    kept = wanted.recipe.train.max_steps // every if every else 0
    seen = f"{show_size(free)} free at {place}, {count} checkpoints take {show_size(count * size)}"
    if count * size > free:
        return problem(StorageError(seen), "free some space, or pass a --root with more")
    if kept * size > free:
        seen += f"; the {kept:,} that are kept permanently take {show_size(kept * size)}"
        return warning(seen, "raise checkpoint.keep_interval_steps")
    return ok(seen)


def check_local_folder(wanted: NodeRequirements) -> Finding:
    place = Path(tempfile.gettempdir())
    free, needed = _free(place), wanted.cache_bytes
    if wanted.recipe.compile.enabled and os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
        seen = f"{place}: mounted noexec, but compiled graphs are executed from there"
        return problem(StorageError(seen), "set TMPDIR to a folder on a mount without noexec")
    seen = f"{place}: {show_size(free)} free, the copy of the compile cache takes {show_size(needed)}"
    if needed > free:
        return problem(StorageError(seen), "free some space there, or set TMPDIR to a folder with more")
    return ok(seen)


def check_cpu_cores(recipe: Recipe, workers: int) -> Finding:
    cores, of_worker = num_cores(), recipe.parallel.threads_per_worker
    seen = f"{cores:g}; {workers} workers of {of_worker} threads take {workers * of_worker}"
    if workers * of_worker > cores:
        fewer = f"--parallel.threads_per_worker={max(1, int(cores // workers))}, or fewer workers on a node"
        return warning(f"{seen}, so they wait for each other in every step", fewer)
    return ok(seen)


def check_memory(recipe: Recipe, workers: int) -> Finding:
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - int(used)))
    seen = f"{show_size(available)} of {show_size(total)} available"
    if recipe.parallel.device != "cpu":
        return ok(f"{seen}; the device has its own")
    needed = workers * memory_of_worker(recipe).peak_bytes
    seen += f"; {workers} workers take {show_size(needed)} at their peak, libraries not counted"
    if needed > total:
        fewer = "lower batch.micro_batch_size, or use fewer workers on a node; `plan` shows what uses the memory"
        return problem(DeviceError(seen), fewer)
    return warning(seen, "end other processes on this node") if needed > available else ok(seen)


def check_gpus(recipe: Recipe, workers: int) -> Finding:
    """Check that each worker has a GPU with the memory that it needs, and that no other process holds it."""
    try:
        kinds = Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    except RuntimeError as error:  # the driver is too old for torch's CUDA
        return problem(DeviceError(f"torch cannot use the GPUs: {error}"), "update the NVIDIA driver of the node")
    found = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none"
    peak_bytes = memory_of_worker(recipe).peak_bytes
    seen = f"{found}; {workers} workers take one each, and {show_size(peak_bytes)} of it, libraries not counted"
    if (lacking := workers - kinds.total()) > 0:
        fewer = "lower cluster.trainer_workers_per_node" if kinds else "see device"
        fewer += f", or name more GPUs in {VISIBLE_VARIABLE}" if VISIBLE_VARIABLE in os.environ else ""
        return problem(DeviceError(f"{seen}: {lacking} too few"), fewer)
    for gpu in range(workers):
        try:
            free, size = torch.cuda.mem_get_info(gpu)
        except RuntimeError as error:  # other processes leave no memory for a context, or the driver fails
            return problem(DeviceError(f"GPU {gpu}: {error}"), "find other processes with nvidia-smi")
        if peak_bytes > size:
            return problem(DeviceError(f"{seen}; GPU {gpu} has {show_size(size)}"), "`plan` shows what uses the memory")
        if free < max(size // 2, peak_bytes):
            others = f"{seen}; of GPU {gpu} other processes hold {show_size(size - free)}"
            return warning(others, "find them with nvidia-smi")
    return ok(seen)


def check_neuron_cores(recipe: Recipe, workers: int) -> Finding:
    """Check that a node's chips have a logical NeuronCore for each of its `workers`.

    The driver lists chips alone, so the cores of a chip are those of the recipe's instance type.
    """
    chips, node = len(neuron_chips()), instance_type(recipe)
    seen = f"{chips} chips in {NEURON_DEVICES}, {workers} workers take a logical core each"
    if not chips:
        start = f"start the container with --device={NEURON_DEVICES}/neuron0 ..., and compare with neuron-ls"
        return warning(f"{seen}: the library is a stand-in, or the container has no devices", start)
    if node is None:
        return ok(f"{seen}; their number is unknown without cluster.trainer_instance_type")
    cores = chips * (node.workers // node.chips)
    size = f", each of {node.logical_core_size} physical" if node.logical_core_size else ""
    seen = f"{seen}; a chip of {node.name} has {cores // chips}{size}"
    if cores < workers:
        fewer = f"--cluster.trainer_workers_per_node={cores}, or add devices"
        return problem(DeviceError(f"{seen}: {workers - cores} too few"), fewer)
    return ok(seen)


def check_device(recipe: Recipe) -> Finding:
    """Check the backend. Nodes are compared by the fingerprint of the program on them."""
    require_backend(recipe.parallel.device)
    facts = program_facts(recipe)
    versions = {name: facts[name] for name in ("torch", "cuda", "triton", "cxx") if name in facts}
    shown = ", ".join(f"{name} {found}" for name, found in {**versions, **facts.get("libraries", {})}.items())
    seen = f"{recipe.parallel.device} on {facts['machine']}, variant {image_variant()}, {shown}"
    return replace(ok(seen), compared=fingerprint(facts))


def check_matrix_products(recipe: Recipe, workers: int) -> Finding:
    """Measure the FLOP/s of the node's threads or GPUs, by which nodes are compared."""
    dtype, device, speeds = recipe.train.dtype, recipe.parallel.device, list[float]()
    if device == "cuda":
        gpus = range(min(workers, torch.cuda.device_count()))
        speeds = [measure_gemm_peak(dtype, 1, GPU_SECONDS, f"cuda:{number}") for number in gpus]
        what = f"{len(gpus)} GPUs, as fast as the slowest"
    elif device == "cpu":
        threads = max(1, min(workers * recipe.parallel.threads_per_worker, int(num_cores())))
        speeds, what = [measure_gemm_peak(dtype, threads)], f"{threads} threads"
    if not speeds:
        return ok(f"not measured: the device is {device}")
    flops = len(speeds) * min(speeds)
    operations = causal_flops_per_token(recipe) * tokens_per_step(recipe) * workers / recipe.parallel.num_workers
    seen = f"{flops / 1e9:,.0f} GFLOP/s in {dtype} with {what}, at which a step takes {operations / flops:,.3f} s"
    return replace(ok(seen), compared=flops)


def require_commits(place: Path) -> None:
    """Raise `StorageError` unless renames and locks below `place` work as commits and runs need."""
    unfit = "{}: {}. Pass a --root on a POSIX file system, such as ext4, XFS, NFS, Lustre."
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=place) as name:
        full, other = Path(name, "full"), Path(name, "other")
        for folder in (full, other):
            folder.mkdir()
            (folder / "file").write_bytes(b"\0" * 4096)
        with (full / "file").open("r+b") as held, (full / "file").open("r+b") as second:  # NFS locks no reader
            fcntl.flock(held, fcntl.LOCK_EX)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise StorageError(unfit.format(place, "two processes can hold one lock"))
            except BlockingIOError:
                pass
        try:
            other.rename(full)
        except OSError:
            return
        raise StorageError(unfit.format(place, "rename() overwrites a non-empty directory"))


def measure_speed(place: Path, num_bytes: int) -> tuple[float, float, float]:
    """Return the seconds of an fsync, and the bytes per second of writing and of reading a file of `num_bytes`.

    The kernel drops the file from its cache before it is read; a file server may still cache it.
    """
    block, times = os.urandom(min(BLOCK_BYTES, num_bytes)), []  # some file systems compress
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        for size in (*[4096] * FSYNCS, num_bytes):
            started, written = time.perf_counter(), 0
            while written < size:
                written += file.write(block[: size - written])
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(BLOCK_BYTES):
            pass
        read_seconds = time.perf_counter() - started
    return statistics.median(times[:-1]), num_bytes / times[-1], num_bytes / read_seconds


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
