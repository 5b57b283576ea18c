"""Puts other kinds of files in the place of a regular one: folders, pipes, sockets, devices and links."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path


def _bind_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _link_outside(path: Path) -> None:
    outside = path.parent.parent.parent / f"outside-{path.name}"
    outside.write_bytes(b"{}")
    path.symlink_to(outside)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


_MAKERS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": _bind_socket,
    "device without an end": lambda path: path.symlink_to("/dev/zero"),
    "device that is full": lambda path: path.symlink_to("/dev/full"),
    "link to a pipe": _link_to_pipe,
    "link outside": _link_outside,
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}

STRANGE_FILES = tuple(_MAKERS)


def replace_by(kind: str, path: Path) -> None:
    """Put one of STRANGE_FILES at `path`. A link outside leads to a file three folders above `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    _MAKERS[kind](path)
