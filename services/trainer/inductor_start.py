"""What Inductor imports and computes once in a process, before it finds a first graph in its cache.

It does so when it is needed: at the first step. Workers that are forked have it done before.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

_KEYS = ("torch_key", "triton_key")
# The last ones torch imports where it compiles, or finds, a graph, and not at the top of a file.
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


def begin_inductor(can_fork: bool) -> None:
    """Import it, and compute the part of its keys that all graphs have in common: the hashes of torch's and Triton's
    sources, 0.6 s. A fork does that meanwhile, where nothing speaks against one.
    """
    codecache = importlib.import_module("torch._inductor.codecache")
    hashes = [getattr(codecache, name) for name in _KEYS if hasattr(getattr(codecache, name), "set")]  # not torch 2.9
    with _calling_in_a_fork(hashes) if can_fork else nullcontext():
        for module in _MODULES:
            importlib.import_module(module)
    codecache.torch_key()
    codecache.CacheBase.get_system()


@contextmanager
def _calling_in_a_fork(functions: Sequence[Any]) -> Iterator[None]:
    """Have each of torch's cached functions called while the block takes, on another core, and know its result then."""
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
    if written:  # else it failed, and this process will find out why where it needs them
        for function, result in zip(functions, pickle.loads(written), strict=True):
            function.set(result)


def _write_results(functions: Sequence[Callable[[], Any]], writer: int) -> None:
    try:
        with suppress(Exception):
            os.write(writer, pickle.dumps([function() for function in functions]))
    finally:
        os._exit(0)
