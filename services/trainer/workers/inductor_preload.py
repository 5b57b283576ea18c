"""Does as `preload` does for workers whose steps Inductor compiles.

Inductor's one-time imports and hashes of a process are done before workers are forked from it. Otherwise Inductor does
this work at the first step, before it finds the first graph in its cache.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle  # nosec B403 # only a child process's bytes are loaded
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import services.trainer.workers.preload

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


def prepare_inductor() -> None:
    """Import Inductor and compute the part of cache keys that all graphs share, on a machine without a GPU.

    That part is a hash of torch's sources, which takes 0.25 s: a forked process computes it during the imports.
    """
    codecache = importlib.import_module("torch._inductor.codecache")
    can_be_set = hasattr(codecache.torch_key, "set")  # not in torch 2.9
    with _calling_in_a_fork(codecache.torch_key) if can_be_set else nullcontext():
        for module in _MODULES:
            with suppress(ImportError):  # one of them needs setuptools, which an image may lack
                importlib.import_module(module)
    codecache.torch_key()
    if hasattr(codecache, "triton_key"):  # not in torch 2.9
        # Torch would hash Triton's library, which takes 0.35 s, and use the hash for graphs of a GPU alone.
        codecache.triton_key.set(None)
    codecache.CacheBase.get_system()


@contextmanager
def _calling_in_a_fork(function: Any) -> Iterator[None]:
    """Call torch's cached function in a forked process during the block, and store its result in the cache."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _write_result(function, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            yield
            written = file.read()
    finally:
        os.waitpid(child, 0)
    if written:  # after a failure this process calls the function itself and sees the error
        function.set(pickle.loads(written))  # nosec B301 # bytes that the child process above made


def _write_result(function: Callable[[], Any], writer: int) -> None:
    try:
        with suppress(Exception):
            os.write(writer, pickle.dumps(function()))
    finally:
        os._exit(0)


gc.disable()
try:
    import services.common.program.backends.inductor  # noqa: F401

    prepare_inductor()
finally:
    gc.freeze()
    gc.enable()
