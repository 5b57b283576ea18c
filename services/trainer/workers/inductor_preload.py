"""Does as `preload` does for workers whose steps Inductor compiles.

Inductor's one-time imports and hashes of a process are done before workers are forked from it. Otherwise Inductor does
this work at the first step, before it finds the first graph in its cache.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

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

    That part is a hash of torch's sources, which takes 0.25 s.
    """
    for module in _MODULES:
        with suppress(ImportError):  # one of them needs setuptools, which an image may lack
            importlib.import_module(module)
    codecache = importlib.import_module("torch._inductor.codecache")
    codecache.torch_key()
    if hasattr(codecache, "triton_key"):  # not in torch 2.9
        # Torch would hash Triton's library, which takes 0.35 s, and use the hash for graphs of a GPU alone.
        codecache.triton_key.set(None)
    codecache.CacheBase.get_system()


gc.disable()
try:
    import services.common.program.backends.inductor  # noqa: F401

    prepare_inductor()
finally:
    gc.freeze()
    gc.enable()
