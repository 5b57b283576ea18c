"""Checks one node: disks, cores, memory, device and limits. `doctor` runs it as a task on every node."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from services.common.artifacts.corpus_rows import MAX_MAPS
from services.common.errors import DeviceError, LimitError, StorageError
from services.common.hardware.image_platform import require_backend
from services.common.hardware.instance_types import MIB
from services.common.process.limits import SPARE_MAPS, maps_to_allow, max_maps
from services.common.process.private_folder import private_base
from services.common.program.fingerprint import program_facts
from services.common.recipe.derived import causal_flops_per_token, tokens_per_step
from services.common.recipe.memory_estimate import checkpoint_bytes, memory_of_worker
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.checkpoints.retention import most_checkpoints
from services.trainer.inspection.file_system import (
    FileSystemSpeed,
    Mount,
    existing_place,
    find_mount,
    measure_speed,
    probe_folder,
    require_commits,
)
from services.trainer.inspection.findings import Finding, look_at, ok, problem, show_size, warning
from services.trainer.inspection.gemm_peak import measure_gemm_peak
from services.trainer.inspection.gpu_inspection import look_at_gpus, look_at_products
from services.trainer.inspection.neuron_inspection import look_at_neuron_cores

PROBE_BYTES = 64 * MIB
SLOW_FSYNC_SECONDS = 0.25
"""Seconds of an fsync above which `doctor` warns: a commit with eight files and folders then takes two seconds. NFS and
Lustre take a few milliseconds.
"""
FORGETFUL = {
    "tmpfs": "memory: its files are lost with the machine",
    "ramfs": "memory: its files are lost with the machine",
    "overlay": "a container's own layer: its files are lost with the container",
}
SPARE_FILES = 16
"""Number of files of a checkpoint besides its shards: manifest, lock, partial folders."""
OPEN_FILES = 256
"""Number of files that a worker opens besides the corpus: sockets, logs, TensorBoard, libraries."""
RAY_SHARED_BYTES = 128 * MIB
_CGROUP = Path("/sys/fs/cgroup")
_INFINIBAND = Path("/sys/class/infiniband")
_CHECK_ROOT = "file system"


@dataclass(frozen=True)
class NodeQuestion:
    """Requirements of the run that every node is checked for."""

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

    @property
    def threads(self) -> int:
        return self.workers * self.recipe.parallel.threads_per_worker


@dataclass(frozen=True)
class NodeView:
    """Result of checking one node."""

    findings: list[Finding]
    fingerprint: str
    """Fingerprint of the program on this node; empty if the node lacks its device or backend."""
    gemm_flops_per_second: float
    """Measured speed of matrix products; 0 if it was not measured."""


def read_clock(_: None) -> float:
    """Return this node's time, in seconds since 1970."""
    return time.time()


def look_at_node(question: NodeQuestion) -> NodeView:
    """Check this node. A check that fails becomes a finding, so this raises nothing."""
    recipe = question.recipe
    try:
        place = existing_place(question.root)
    except OSError as error:
        return NodeView(
            [problem(_CHECK_ROOT, StorageError(str(error)), "pass a --root that this user may enter")], "", 0.0
        )
    elsewhere = "pass a --root that this user can write to, with space"
    fingerprints: list[str] = []
    speeds: list[float] = []
    findings = [
        *look_at(_CHECK_ROOT, partial(_look_at_root, place, question), elsewhere),
        *look_at("disk space", partial(_look_at_space, place, question), elsewhere),
        *look_at("node's own folder", partial(_look_at_private_folder, question), "set TMPDIR to a folder of your own"),
        *look_at("CPU cores", partial(_look_at_cores, question), "lower parallel.threads_per_worker"),
        *look_at("memory", partial(_look_at_memory, question), "run `plan`, which shows what uses the memory"),
        *look_at("GPUs", partial(_look_at_gpus, question), "run nvidia-smi, which shows the state of the driver"),
        *look_at("NeuronCores", partial(_look_at_cores_of_chips, question), "run neuron-ls, which shows the chips"),
        *look_at("device", partial(_look_at_device, question, fingerprints), _device_advice(recipe)),
        *look_at("limits", partial(_look_at_limits, question), "ulimit -n 65536"),
        *look_at("matrix products", partial(_look_at_gemm, question, speeds), "find other processes on this node"),
    ]
    return NodeView(findings, "".join(fingerprints), sum(speeds))


def _look_at_root(place: Path, question: NodeQuestion) -> Iterator[Finding]:
    if question.shared and not question.shared.exists():
        seen = f"{question.shared}: missing here, but the command's node has it: {question.root} is another file system"
        yield problem(_CHECK_ROOT, StorageError(seen), "mount the same volume on every node of the stage")
        return
    mount = find_mount(place)
    free = _free_bytes(place)
    with probe_folder(place) as folder:
        require_commits(folder)
        speed = measure_speed(folder, max(MIB, min(PROBE_BYTES, free // 8)))
    where = f"{mount.kind} at {mount.point}" if mount else f"{place}"
    absent = "" if place == question.root else f"; {question.root} does not exist yet, and the first stage makes it"
    yield _judge_kind(f"{where}, renames and links are atomic{absent}", mount)
    yield _judge_speed(speed, question.recipe)


def _judge_kind(seen: str, mount: Mount | None) -> Finding:
    if mount and mount.kind in FORGETFUL:
        return warning(_CHECK_ROOT, f"{seen}; {FORGETFUL[mount.kind]}", "pass a --root on a disk or a volume")
    return ok(_CHECK_ROOT, seen)


def _judge_speed(speed: FileSystemSpeed, recipe: Recipe) -> Finding:
    size = checkpoint_bytes(recipe)
    seen = (
        f"fsync {_ms(speed.fsync_seconds)}, new file {_ms(speed.create_seconds)}, write "
        f"{speed.write_bytes_per_second / 1e6:,.0f} MB/s, read {speed.read_bytes_per_second / 1e6:,.0f} MB/s: a "
        f"checkpoint of {show_size(size)} takes {size / speed.write_bytes_per_second:,.1f} s at least"
    )
    if speed.fsync_seconds > SLOW_FSYNC_SECONDS:
        return warning("disk speed", seen, "find what else writes there; each commit waits for several fsyncs")
    return ok("disk speed", seen)


def _look_at_space(place: Path, question: NodeQuestion) -> Iterator[Finding]:
    recipe, found = question.recipe, os.statvfs(place)
    count = max(2, most_checkpoints(recipe) - question.checkpoints)
    needed, free = count * checkpoint_bytes(recipe), _free_bytes(place)
    files, free_files = count * (recipe.parallel.num_workers + SPARE_FILES), found.f_favail
    inodes = f", {free_files:,} free inodes" if found.f_files else ""  # btrfs and some network file systems report 0
    seen = (
        f"{show_size(free)} free{inodes} at {place}, {count} checkpoints take {show_size(needed)} and {files:,} inodes"
    )
    if needed > free or (found.f_files and files > free_files):
        yield problem("disk space", StorageError(seen), "free some space, or pass a --root with more")
        return
    kept = (
        recipe.train.max_steps // recipe.checkpoint.keep_interval_steps if recipe.checkpoint.keep_interval_steps else 0
    )
    if kept * checkpoint_bytes(recipe) > free:
        all_kept = show_size(kept * checkpoint_bytes(recipe))
        yield warning(
            "disk space",
            f"{seen}; the {kept:,} that are kept permanently take {all_kept}",
            "raise checkpoint.keep_interval_steps",
        )
        return
    yield ok("disk space", seen)


def _look_at_private_folder(question: NodeQuestion) -> Iterator[Finding]:
    check, base = "node's own folder", private_base()
    free, needed = _free_bytes(base), question.cache_bytes
    seen = f"{base}: {show_size(free)} free, the copy of the compile cache takes {show_size(needed)}"
    if needed > free:
        yield problem(check, StorageError(seen), "free some space there, or set TMPDIR to a folder with more")
    elif os.statvfs(base).f_flag & getattr(os, "ST_NOEXEC", 0) and question.recipe.compile.enabled:
        seen = f"{base}: mounted noexec, but compiled graphs are executed from there"
        yield problem(check, StorageError(seen), "set TMPDIR to a folder on a mount without noexec")
    else:
        with probe_folder(base) as folder:
            (folder / "file").write_bytes(b"a full file system refuses these bytes")
        yield ok(check, seen)


def _look_at_cores(question: NodeQuestion) -> Iterator[Finding]:
    cores = num_cores()
    threads = question.recipe.parallel.threads_per_worker
    seen = f"{cores:g}; {question.workers} workers of {threads} threads take {question.threads}"
    if question.threads > cores:
        yield warning(
            "CPU cores",
            f"{seen}, so they wait for each other in every step",
            f"--parallel.threads_per_worker={max(1, int(cores // question.workers))}, or fewer workers on a node",
        )
    else:
        yield ok("CPU cores", seen)


def num_cores() -> float:
    """Return the number of cores that this process may use, or less if its control group has a smaller quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _read_line(_CGROUP / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def _look_at_memory(question: NodeQuestion) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _read_line(_CGROUP / "memory.max"), _read_line(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        total, available = min(total, int(limit)), min(available, max(0, int(limit) - int(used)))
    shared = "host memory; the device has its own" if question.recipe.parallel.device != "cpu" else ""
    if shared:
        yield ok("memory", f"{show_size(available)} of {show_size(total)} available of {shared}")
        return
    of_worker = memory_of_worker(question.recipe).peak_bytes
    needed = question.workers * of_worker
    seen = (
        f"{show_size(available)} of {show_size(total)} available; {question.workers} workers take "
        f"{show_size(needed)} at their peak, libraries not counted"
    )
    advice = "lower batch.micro_batch_size, or use fewer workers on a node; `plan` shows what uses the memory"
    if needed > total:
        yield problem("memory", DeviceError(seen), advice)
    elif needed > available:
        yield warning("memory", seen, "end other processes on this node")
    else:
        yield ok("memory", seen)


def _look_at_gpus(question: NodeQuestion) -> Iterator[Finding]:
    if question.recipe.parallel.device == "cuda":
        yield from look_at_gpus(question.recipe, question.workers)


def _look_at_cores_of_chips(question: NodeQuestion) -> Iterator[Finding]:
    if question.recipe.parallel.device in ("xla", "neuron"):
        yield look_at_neuron_cores(question.recipe, question.workers)


def _look_at_device(question: NodeQuestion, fingerprints: list[str]) -> Iterator[Finding]:
    recipe = question.recipe
    require_backend(recipe.parallel.device)
    facts = program_facts(recipe)
    fingerprints.append(fingerprint(facts))
    names = {"cuda": "CUDA ", "triton": "Triton "} | ({"cxx": ""} if recipe.compile.enabled else {})
    others = "".join(f", {title}{facts[name]}" for name, title in names.items() if name in facts)
    others += "".join(f", {name} {found}" for name, found in facts.get("libraries", {}).items())
    yield ok("device", f"{recipe.parallel.device} on {facts['machine']}, torch {facts['torch']}{others}")


def _device_advice(recipe: Recipe) -> str:
    check = "python -m services.common.hardware.image_platform"
    return f"show this node's devices with {check}; the recipe says {recipe.parallel.device}"


def _look_at_gemm(question: NodeQuestion, speeds: list[float]) -> Iterator[Finding]:
    recipe, check = question.recipe, "matrix products"
    if recipe.parallel.device == "cuda":
        yield from look_at_products(recipe, question.workers, speeds)
        return
    if recipe.parallel.device != "cpu":
        yield ok(check, f"not measured: the device is {recipe.parallel.device}")
        return
    dtype, threads = recipe.train.dtype, max(1, min(question.threads, int(num_cores())))
    speed = measure_gemm_peak(dtype, threads)
    speeds.append(speed)
    seconds = causal_flops_per_token(recipe) * tokens_per_step(recipe) / _nodes_of_a_step(question) / speed
    yield ok(
        check, f"{speed / 1e9:,.0f} GFLOP/s in {dtype} with {threads} threads, at which a step takes {seconds:,.2f} s"
    )


def _nodes_of_a_step(question: NodeQuestion) -> float:
    """Return the number of nodes that share a step, if all nodes have as many workers as this one."""
    return question.recipe.parallel.num_workers / question.workers


def _look_at_limits(question: NodeQuestion) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    seen = f"{'any number of' if unlimited else f'{soft:,}'} open files, a worker may need {OPEN_FILES:,}"
    if not unlimited and soft < OPEN_FILES:
        yield problem("open files", DeviceError(seen), f"ulimit -n {OPEN_FILES} (the hard limit is {hard:,})")
    else:
        yield ok("open files", seen)
    yield from _look_at_maps()
    shm = Path("/dev/shm")  # nosec B108 # only measured
    if shm.is_dir():
        found = os.statvfs(shm)
        size = found.f_bavail * found.f_frsize
        seen = f"{show_size(size)} free in {shm}"
        if question.launch == "ray" and size < RAY_SHARED_BYTES:
            wanted = show_size(RAY_SHARED_BYTES)
            yield warning(
                "shared memory",
                f"{seen}, Ray's object store takes {wanted}",
                "start the container with --shm-size=256m",
            )
        else:
            yield ok("shared memory", seen)
    if question.recipe.parallel.device in ("neuron", "xla") and _INFINIBAND.is_dir():
        yield from _look_at_pinned_memory()


def _look_at_maps() -> Iterator[Finding]:
    """Check the limit of memory maps, of which a worker needs the same number for a corpus of any size."""
    most = max_maps()
    if most is None:
        return
    needed = SPARE_MAPS + MAX_MAPS
    seen = f"{most:,} maps (vm.max_map_count), a worker may need {needed:,}"
    if most < needed:
        yield problem("maps", LimitError(seen), f"sysctl -w vm.max_map_count={maps_to_allow(MAX_MAPS)}")
    else:
        yield ok("maps", seen)


def _look_at_pinned_memory() -> Iterator[Finding]:
    """Check the memory that EFA can register with the network card."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = _read_line(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"))
    locked = "any" if soft == resource.RLIM_INFINITY else show_size(soft)
    seen = f"{locked} locked memory, {free or 'no'} free huge pages of 2 MiB, for EFA"
    if soft != resource.RLIM_INFINITY:
        yield warning("pinned memory", seen, "ulimit -l unlimited")
    elif not free or free == "0":
        yield warning("pinned memory", seen, "give the pod hugepages-2Mi, as the deployment's EFA settings do")
    else:
        yield ok("pinned memory", seen)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.2f} ms"


def _free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _read_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
