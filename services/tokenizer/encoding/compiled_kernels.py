"""The folder in which numba keeps compiled kernels. An image contains compiled ones, because compilation takes 6 s.

Numba checks only the file that a function is in, and would run an old kernel after a change of another file. So the
folder's name has a digest of all files. Numba also needs a folder that it can write to, and compiles for the processor
at hand. An image is read-only and runs on other processors than the one that built it. So the image's kernels are
compiled for `common_processor`, and are copied to a local folder on first use.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from services.common.process.private_folder import require_private

SHIPPED_VARIABLE = "MILLRACE_COMPILED_KERNELS"

_X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})


def choose_kernel_folder() -> None:
    """Set NUMBA_CACHE_DIR to the folder of compiled kernels, unless it is set. Call this before numba is imported.

    Raises `StorageError` when another user could change files in that folder.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    local = Path(tempfile.gettempdir()) / f"millrace-kernels-{os.getuid()}-{_digest_of_sources()}"
    shipped = Path(os.environ.get(SHIPPED_VARIABLE, "/nowhere"))
    is_shipped = shipped.is_dir() and is_common_processor()
    if not local.exists():
        with tempfile.TemporaryDirectory(prefix="millrace-", dir=local.parent) as folder:
            made = Path(folder) / "kernels"
            if is_shipped:
                shutil.copytree(shipped, made)
            else:
                made.mkdir()
            made.chmod(0o700)
            try:
                made.rename(local)
            except OSError:
                if not local.exists():  # otherwise another process has made the folder
                    raise
    require_private(local)  # numba runs the code in it
    os.environ |= {"NUMBA_CACHE_DIR": str(local), **(common_processor() if is_shipped else {})}


def compile_once(name: str, compile_all: Callable[[], None]) -> None:
    """Call `compile_all` unless numba's folder has its kernels. Processes that call this meanwhile wait.

    Workers start at the same time, and would otherwise compile the same kernels at the same time.
    """
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or "/nowhere")
    if not os.access(folder, os.W_OK):  # numba uses another folder, or keeps no compiled code
        compile_all()
        return
    done = folder / f"{name}-{_digest_of_compiler()}.compiled"
    if done.exists():
        return
    with (folder / "compiling.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            compile_all()
            done.touch()


@cache
def _digest_of_sources() -> str:
    hasher = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:12]


def _digest_of_compiler() -> str:
    """Return a digest of the facts that make numba compile again: Python, numba, processor and sources."""
    import llvmlite.binding  # noqa: PLC0415 - numba has imported it already

    facts = (
        sys.implementation.cache_tag,
        importlib.metadata.version("numba"),
        os.environ.get("NUMBA_CPU_NAME") or llvmlite.binding.get_host_cpu_name(),
        str(Path(__file__).parent),
        _digest_of_sources(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def common_processor() -> dict[str, str]:
    """Return variables that make numba compile for every x86-64 processor since 2015.

    On a Zen 4 these kernels are 1 % slower than kernels for that processor.
    """
    return {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}


def is_common_processor() -> bool:
    """Return whether this machine runs code that was compiled for `common_processor`."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return platform.machine() == "x86_64" and _X86_64_V3.issubset(flags)
