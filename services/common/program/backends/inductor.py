"""Inductor with settings for reproducible graphs, and a counter of the graphs that it compiles."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._inductor.codecache
import torch._inductor.config
import torch._inductor.cpu_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass

from services.common.errors import DeviceError
from services.common.program.backends.inductor_facts import CACHE_VARIABLE
from services.common.program.backends.warm_cache import missing_graphs, name_of
from services.common.program.backends.whole_graph import compile_whole

R = TypeVar("R")

logger = logging.getLogger(__name__)


class Inductor:
    """Compiles functions, and counts in `counter` the graphs that were not in the cache."""

    def __init__(self) -> None:
        torch.use_deterministic_algorithms(True)
        # Otherwise Inductor times reductions of several block sizes on a GPU, and a step's bits depend on the fastest.
        if hasattr(torch._inductor.config, "deterministic"):  # not in torch 2.9, whose variant compiles for no GPU
            torch._inductor.config.deterministic = True
        # Triton cuts a kernel's file name at 150 characters, and Inductor finds no cached kernel with a longer one:
        # each process compiled 4 of a step's again (seen on an H100 with torch 2.11; 2.13 has the same lines).
        torch._inductor.config.triton.descriptive_names = False  # type: ignore[assignment]
        self.counter = CompileCounter()
        torch._inductor.config.post_grad_custom_pre_pass = self.counter
        folder = os.environ.get(CACHE_VARIABLE)
        if folder and any(Path(folder).glob("*")):  # graphs that another process compiled
            # Inductor precompiles its C++ header (8 s, 155 MB) before it knows whether there is a kernel to compile.
            torch._inductor.codecache._precompile_header = _name_header  # type: ignore[assignment]
        # Inductor starts a Python process for each instruction set of the CPU to load a library: 1.2 s in all.
        torch._inductor.cpu_vec_isa.VecISA._probe_load = _is_loadable  # type: ignore[method-assign]

    def forbid_compilation(self) -> None:
        """Raise `DeviceError` where a graph is compiled from now on."""
        self.counter.is_forbidden = True

    @property
    def graphs_compiled(self) -> int:
        return self.counter.graphs_compiled

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        """Compile a function for the shapes of its first call. Other shapes compile again, unless `is_dynamic`."""
        compiled = compile_whole(function, dynamic=is_dynamic)

        def call(*arguments: Any) -> R:
            self.counter.graph = f"a graph of {name_of(function)}"
            try:
                return compiled(*arguments)
            except RuntimeError as error:  # Dynamo wraps the error that the counter raises
                if self.counter.refusal:
                    raise self.counter.refusal from error
                raise

        return call


def _name_header(header: str, *_: Any, **__: Any) -> str:
    """Return the header without precompiling it. Kernels then compile more slowly, because g++ parses it each time."""
    return header


def _is_loadable(self: torch._inductor.cpu_vec_isa.VecISA, output_path: str) -> bool:
    """Return whether the library loads, tried in this process: it refers to functions of torch, and runs none."""
    try:
        ctypes.CDLL(output_path)
    except OSError:
        return False
    return True


class CompileCounter(CustomGraphPass):
    """Inductor pass that counts graphs: it runs when a graph is compiled, and not when the graph is in the cache.

    Inductor's own counters report a hit also where it then builds the graph's machine code again. The pass changes no
    graph. Its `uuid` is fixed, so that cache keys of the compiler and of the trainer are equal.
    """

    def __init__(self) -> None:
        self.graphs_compiled = 0
        self.is_forbidden = False
        self.refusal: DeviceError | None = None
        self.graph = ""
        """Name of the graph that is compiled next."""

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        self.graphs_compiled += 1
        if self.is_forbidden:
            self.refusal = missing_graphs([self.graph])
            raise self.refusal

    def uuid(self) -> str:
        return "millrace-compile-counter"
