"""Lets Inductor do its one-time imports and hashes of a process before workers are forked from it.

Otherwise Inductor does this work at the first step, before it finds the first graph in its cache.
"""

from __future__ import annotations

import importlib
import os
import pickle  # nosec B403 # only a child process's bytes are loaded
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_KEYS = ("torch_key", "triton_key")
# Torch imports all but the first module inside of functions that compile or find a graph.
_MODULES = (
    "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compiler_bisector",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)


def begin_inductor() -> None:
    """Import Inductor and compute the part of cache keys that all graphs share: hashes of torch's and Triton's sources.

    The hashes take 0.6 s: a forked process computes them during the imports.
    """
    codecache = importlib.import_module("torch._inductor.codecache")
    hashes = [
        getattr(codecache, name) for name in _KEYS if hasattr(getattr(codecache, name), "set")
    ]  # torch 2.9 has none
    with _calling_in_a_fork(hashes):
        for module in _MODULES:
            importlib.import_module(module)
    codecache.torch_key()
    codecache.CacheBase.get_system()


@contextmanager
def _calling_in_a_fork(functions: Sequence[Any]) -> Iterator[None]:
    """Call torch's cached functions in a forked process during the block, and store their results in the caches."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _write_results(functions, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            yield
            written = file.read()
    finally:
        os.waitpid(child, 0)
    if written:  # after a failure this process calls the functions itself and sees the error
        results = pickle.loads(written)  # nosec B301 # bytes that the child process above made
        for function, result in zip(functions, results, strict=True):
            function.set(result)


def _write_results(functions: Sequence[Callable[[], Any]], writer: int) -> None:
    try:
        with suppress(Exception):
            os.write(writer, pickle.dumps([function() for function in functions]))
    finally:
        os._exit(0)
