"""Where numba keeps compiled kernels. An image ships them (`shipped_kernels`), so that no pod has to compile (6 s).

Numba looks at the one file that a function is in, and would run a kernel of which another file has changed; so the
folder's name follows from all of them. It also wants a folder that it can write to, and goes by processor, while an
image is read-only and runs on other processors than the one that built it: what is shipped is compiled for a common
one, and copied on first use.
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

from services.common.private_folder import require_private

SHIPPED_VARIABLE = "MILLRACE_COMPILED_KERNELS"

_X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})


def choose_kernel_folder() -> None:
    """Tell numba, before it is imported, where it finds and keeps kernels on this machine.

    NUMBA_CACHE_DIR, when it is set, is where that is. Raises `StorageError` when others could change the kernels.
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
                if not local.exists():  # else another process was faster
                    raise
    require_private(local)  # numba runs what it finds there
    os.environ |= {"NUMBA_CACHE_DIR": str(local), **(common_processor() if is_shipped else {})}


def compile_once(name: str, compile_all: Callable[[], None]) -> None:
    """Call `compile_all` unless it has left its kernels in numba's folder; who comes meanwhile waits for it.

    Workers start together, and without this each would compile the same.
    """
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or "/nowhere")
    if not os.access(folder, os.W_OK):  # numba looks for another place, or keeps nothing
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
    """Of what numba tells kernels in the same folder apart by."""
    import llvmlite.binding  # noqa: PLC0415 - numba has imported it by now

    facts = (
        sys.implementation.cache_tag,
        importlib.metadata.version("numba"),
        os.environ.get("NUMBA_CPU_NAME") or llvmlite.binding.get_host_cpu_name(),
        str(Path(__file__).parent),
        _digest_of_sources(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def common_processor() -> dict[str, str]:
    """What makes numba compile for every x86-64 since 2015: 1 % slower than for the one at hand (Zen 4)."""
    return {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}


def is_common_processor() -> bool:
    """Does code that is compiled for `common_processor` run here?"""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return platform.machine() == "x86_64" and _X86_64_V3.issubset(flags)
