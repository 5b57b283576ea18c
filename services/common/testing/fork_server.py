"""Processes that start in milliseconds: forks of one that has imported what they run, and has no threads."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest

from services.common.launch import inline

_preloaded = [__name__]


class _Process(ForkServerProcess):
    """Has the environment of the process that starts it, and not that of the server, which is older."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        tempfile.tempdir = None
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def preload(*modules: str) -> None:
    """Have the server import these. To be called while a test's module is imported: the first process starts it."""
    _preloaded.extend(modules)
    multiprocessing.set_forkserver_preload(_preloaded)


def start_process(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    child = _Process(target=function, args=arguments)
    child.start()
    return child


@contextmanager
def forking_workers() -> Iterator[None]:
    """The inline launcher starts forks instead of new interpreters, which import torch for 2.5 s of CPU each."""
    forkserver.ensure_running()  # here, because it hands down which signals are blocked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline, "_CONTEXT", _Context())
        yield
