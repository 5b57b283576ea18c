"""Mounts a small ext4 file system of its own for a soak, which can be filled, freed and suspended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BALLAST = "ballast"
_LEAST_BYTES = 4096


class Disk:
    """A mounted file system in an image file, for root alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Write a file until no block is left."""
        descriptor = os.open(self.folder / _BALLAST, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            size, end = _free_bytes(self.folder), 0
            while size >= _LEAST_BYTES:
                try:
                    os.posix_fallocate(descriptor, end, size)
                    end += size
                except OSError:
                    size //= 2
        finally:
            os.close(descriptor)

    def free(self) -> None:
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def suspend(self) -> None:
        """Let every write wait until `resume`, as a network file system does whose server is gone for a while."""
        subprocess.run(["fsfreeze", "--freeze", self.folder], check=True)

    def resume(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", self.folder], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def mounted_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Make a file system of this size and mount it at `folder`; unmount it and delete its image at the end."""
    image = folder.with_suffix(".img")
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop,noatime", image, folder], check=True)
    disk = Disk(folder)
    try:
        yield disk
    finally:
        disk.resume()
        subprocess.run(["umount", "--lazy", folder], check=True)  # a process that leaked may hold a file
        image.unlink()
        folder.rmdir()


def _free_bytes(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize
