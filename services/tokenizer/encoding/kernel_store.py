"""Machine code of the kernels in files, because their compilation takes 6 to 8 s.

A file is for one processor, one release of numba and of LLVM, and one state of the kernels' sources: the file's name
has a digest of these, so code for another processor is never run. An image contains files for `common_processor`. All
other files are made on first use, in this user's private folder, where the next process finds them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import llvmlite.binding as llvm

from services.common.input.files import InputFileError, open_for_append, read_file
from services.common.process.private_folder import private_base
from services.tokenizer.atomic_file import write_file
from services.tokenizer.encoding.machine_code import Kernel, MachineCode, argument_types, flatten

logger = logging.getLogger(__name__)

SHIPPED_VARIABLE = "MILLRACE_COMPILED_KERNELS"
"""Environment variable that names the folder of an image's kernels."""

LONGEST_COMPILATION_SECONDS = 60.0
"""Longest wait for another process that compiles, after which a process compiles by itself."""
_POLL_SECONDS = 0.1

_X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})

Compile = Callable[[str, tuple[Any, ...]], MachineCode]


def load_kernel(name: str, arguments: tuple[Any, ...]) -> Kernel:
    """Link the kernel `name` for arguments of these types, from a file where there is one.

    Raises `StorageError` when another user could change the private folder of files.
    """
    code = None
    if SHIPPED_VARIABLE in os.environ and is_common_processor():
        code = _read(Path(os.environ[SHIPPED_VARIABLE]) / _file_name(name, arguments, common_processor()))
    return Kernel(code or read_or_compile(private_base() / "kernels", name, arguments))


def read_or_compile(
    folder: Path, name: str, arguments: tuple[Any, ...], compile_kernel: Compile | None = None
) -> MachineCode:
    """Read a kernel from its file in `folder`, or compile the kernel and write the file.

    Processes that start together compile a kernel once: one compiles, and the others wait for it, for a limited time.
    """
    path = folder / _file_name(name, arguments, os.environ)
    folder.mkdir(mode=0o700, exist_ok=True)
    if (code := _read(path)) is not None:
        return code
    with open_for_append(folder / "compiling.lock") as lock:
        _wait_for(lock)
        if (code := _read(path)) is None:
            code = (compile_kernel or _compile)(name, arguments)
            with write_file(path) as file:
                file.write(code.pack(path.name))
    return code


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


def _compile(name: str, arguments: tuple[Any, ...]) -> MachineCode:
    from services.tokenizer.encoding.kernel_compiler import compile_kernel  # noqa: PLC0415 - imports numba

    return compile_kernel(name, arguments)


def _read(path: Path) -> MachineCode | None:
    """Return the code in a file, or None where the file is missing, damaged, renamed or no regular file."""
    try:
        return MachineCode.unpack(read_file(path), path.name)
    except InputFileError:
        return None


def _wait_for(lock: BinaryIO) -> None:
    """Lock a file, unless another process holds it for `LONGEST_COMPILATION_SECONDS`: that process may be stopped."""
    deadline = time.monotonic() + LONGEST_COMPILATION_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                logger.warning("%s: another process holds this lock and does not finish; compiling, too", lock.name)
                return
            time.sleep(_POLL_SECONDS)
        else:
            return


def _file_name(name: str, arguments: tuple[Any, ...], environment: Mapping[str, str]) -> str:
    """Return the name of a kernel's file for the processor that numba takes from the environment's variables."""
    facts = (
        environment.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name(),
        environment.get("NUMBA_CPU_FEATURES", llvm.get_host_cpu_features().flatten()),
        llvm.get_process_triple(),
        importlib.metadata.version("numba"),
        importlib.metadata.version("llvmlite"),
        _digest_of_sources(),
        argument_types(flatten(arguments)),
    )
    return f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.kernel"


@cache
def _digest_of_sources() -> str:
    hasher = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()
