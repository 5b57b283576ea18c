"""Explains errors that come from the limits of a process and its node on open files, maps, memory and threads.

A file that cannot be opened or mapped because of a limit may be intact. So code that turns a file's error into damage
calls `explain_lack` first. It chooses between two exit codes: 4 where a setting has to change before a retry can help,
and 75 where other processes use all that the node has, which passes.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import LimitError, MillraceError, TryAgain

SPARE_MAPS = 8_192
"""Maps that a worker may need beside the corpus: torch's libraries, threads and allocations take 1,000 to 3,000."""

_MAX_MAPS = Path("/proc/sys/vm/max_map_count")
_MAPS = Path("/proc/self/maps")
_DESCRIPTORS = Path("/proc/self/fd")
_OPEN_FILES_OF_NODE = Path("/proc/sys/fs/file-nr")
_MEMORY_OF_NODE = Path("/proc/meminfo")
_MEMORY_OF_CGROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
_SMALL_BLOCK_BYTES = 2**12
"""Bytes of a read. A larger block would need a map of its own, and there may be none left."""
_NEARLY = 0.9
"""Share of a limit from which on it counts as reached: the files opened last may have been closed by then."""
_NO_THREAD = "can't start new thread"
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def explain_lack(error: BaseException, place: Path | str = "", num_files: int | None = None) -> MillraceError | None:
    """Return the error to raise where `error` comes from a lack of open files, maps, memory or threads; else None.

    `place` is the file that could not be opened, and `num_files` the number of files that the work holds open or mapped
    at a time. Call it while the work still holds them, because it counts the maps of this process.
    """
    number = _find_lack(error)
    where = f"{place}: " if place else ""
    if number == errno.EMFILE:
        return _explain_open_files(where, num_files)
    if number == errno.ENFILE:
        opened, _, most = (_read(_OPEN_FILES_OF_NODE).split() or ["?"] * 3)[:3]
        return TryAgain(
            f"{where}cannot be opened now, which says nothing about the file: the node has {opened} open files and "
            f"fs.file-max allows {most}. End other programs there, or raise it with `sysctl -w fs.file-max=...`; the "
            f"same command tries again."
        )
    if number == errno.EAGAIN:
        most = _show(resource.getrlimit(resource.RLIMIT_NPROC)[0])
        return LimitError(
            f"{where}no thread can be started: this user may have {most} processes and threads (`ulimit -u`), and a "
            f"container as many as its pids.max says. Raise both; where `ulimit -v` is set, raise it too."
        )
    return _explain_memory(where, num_files) if number == errno.ENOMEM else None


def max_maps() -> int | None:
    """Return the most maps that this node allows a process; None where the kernel has no such limit, as on macOS."""
    text = _read(_MAX_MAPS)
    return int(text) if text.isdigit() else None


def num_maps() -> int:
    """Return the number of maps that this process has; 0 where the kernel does not list them."""
    number, block = 0, bytearray(_SMALL_BLOCK_BYTES)
    try:
        with _MAPS.open("rb", buffering=0) as file:
            while size := file.readinto(block):
                number += block.count(b"\n", 0, size)
    except (OSError, MemoryError):
        return 0
    return number


def _find_lack(error: BaseException) -> int | None:
    """Return the errno of the lack. Errors of libraries in Rust and C++ have only its text."""
    for each in _chain(error):
        number = getattr(each, "errno", None)
        if number in _LACKS:
            return int(number)
        if isinstance(each, MemoryError):
            return errno.ENOMEM
        if isinstance(each, FileNotFoundError) and number is None and _are_open_files_used_up():
            return errno.EMFILE  # safetensors raises this for every file that it cannot open
        text = str(each) if isinstance(each, Exception) and not isinstance(each, MillraceError) else ""
        if _NO_THREAD in text:
            return errno.EAGAIN
        for lack in _LACKS:
            if os.strerror(lack) in text:
                return lack
    return None


def _are_open_files_used_up() -> bool:
    """Tell whether so few descriptors are left that a library which opens a file twice gets none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return soft != resource.RLIM_INFINITY and len(list(_DESCRIPTORS.iterdir())) >= soft - 2
    except OSError as error:
        return error.errno == errno.EMFILE


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _explain_open_files(where: str, num_files: int | None) -> LimitError:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = f", and this work opens {num_files:,} files" if num_files else ""
    return LimitError(
        f"{where}cannot be opened, which says nothing about the file: this process may have {_show(soft)} open files "
        f"(RLIMIT_NOFILE){wanted}. Raise the limit with `ulimit -n {max(65_536, 2 * (num_files or 0))}` (the hard "
        f"limit is {_show(hard)}) and run the same command."
    )


def _explain_memory(where: str, num_files: int | None) -> MillraceError:
    begin = f"{where}cannot be taken into memory, which says nothing about the file"
    most, maps = max_maps(), num_maps()
    if most is not None and (maps >= _NEARLY * most or maps + (num_files or 0) > most):
        return _explain_maps(f"{begin}: this process has {maps:,} maps", most, num_files)
    for name, option, limit in (
        ("RLIMIT_AS", "ulimit -v unlimited", resource.RLIMIT_AS),
        ("RLIMIT_DATA", "ulimit -d unlimited", resource.RLIMIT_DATA),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            return LimitError(
                f"{begin}: this process may have {soft / 2**30:,.2f} GiB of memory ({name}). Raise the limit with "
                f"`{option}` and run the same command."
            )
    limit_of_cgroup, used = map(_read, _MEMORY_OF_CGROUP)
    if limit_of_cgroup.isdigit() and used.isdigit() and int(used) >= _NEARLY * int(limit_of_cgroup):
        return LimitError(
            f"{begin}: this container has {int(used) / 2**30:,.2f} of {int(limit_of_cgroup) / 2**30:,.2f} GiB of "
            f"memory (memory.max of its cgroup). Give it more memory, or run fewer workers on a node."
        )
    fields = dict(line.split()[:2] for line in _read(_MEMORY_OF_NODE).splitlines() if len(line.split()) > 1)
    available, total = (int(fields.get(name, 0)) / 2**20 for name in ("MemAvailable:", "MemTotal:"))
    seen = f"{begin}: the node has {available:,.1f} of {total:,.1f} GiB of memory available"
    if available < (1 - _NEARLY) * total:
        return TryAgain(f"{seen}. End other programs there; the same command tries again.")
    return LimitError(
        f"{seen}, and this work asked for more. Use a node with more memory, or fewer workers on a node; `sysctl "
        f"vm.overcommit_memory` tells whether the kernel hands out all memory."
    )


def _explain_maps(seen: str, most: int, num_files: int | None) -> LimitError:
    """Return the error for a node whose limit on maps is too low; `seen` is the beginning of the message."""
    wanted = f", and this work maps {num_files:,} files" if num_files else ""
    return LimitError(
        f"{seen}, and vm.max_map_count allows {most:,}{wanted}. On every node of the stage, run "
        f"`sysctl -w vm.max_map_count={maps_to_allow(max(num_files or 0, most))}` and run the same command."
    )


def maps_to_allow(num_files: int) -> int:
    """Return a value of vm.max_map_count with which a process can map so many files, with room to spare."""
    return 2 ** (num_files + SPARE_MAPS).bit_length()


def _show(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _read(path: Path) -> str:
    """Return a file's text; empty where this machine does not have the file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, MemoryError):
        return ""
