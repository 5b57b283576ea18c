"""Processes that start in milliseconds: forks of one that has imported what they run, and has no threads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

from services.common.launch import child_processes
from services.common.launch.child_processes import start_fork_server

_preloaded = [__name__]


def preload(*modules: str) -> None:
    """Have the server import these. To be called while a test's module is imported: the first process starts it."""
    _preloaded.extend(modules)


def start_process(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    start_fork_server(_preloaded)
    child = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    child.start()
    return child


@contextmanager
def forking_workers() -> Iterator[None]:
    """The inline launcher starts forks instead of new interpreters, which import torch for 2.5 s of CPU each."""
    start_fork_server(_preloaded)  # here, because it hands down which signals are blocked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_processes, "start_method", lambda preload: "forkserver")
        yield
