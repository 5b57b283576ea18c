"""Inductor, told to compile for static shapes and watched while it does."""

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

from services.common.credentials import is_secret
from services.common.errors import DeviceError
from services.common.program.backends.inductor_facts import CACHE_VARIABLE

R = TypeVar("R")

logger = logging.getLogger(__name__)

# Parts of names, as `generate_env_vars_string` in torch/_dynamo/debug_utils.py has them.
_STORED_VARIABLES = ("TORCH", "DYNAMO", "INDUCTOR", "TRITON")


class Inductor:
    """Compiles functions; `counter` counts the graphs that were not in the cache."""

    def __init__(self) -> None:
        _forget_secrets()
        torch.use_deterministic_algorithms(True)  # Inductor's own choices, too
        self.counter = CompileCounter()
        torch._inductor.config.post_grad_custom_pre_pass = self.counter
        if _is_cache_filled():
            # Inductor precompiles its C++ header (8 s, 155 MB) before it looks whether there is a kernel to compile.
            torch._inductor.codecache._precompile_header = _name_header  # type: ignore[assignment]
        # Inductor starts a Python for each instruction set of the CPU, which loads a library of it: 1.2 s in all.
        torch._inductor.cpu_vec_isa.VecISA._probe_load = _is_loadable  # type: ignore[method-assign]

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        """Compile for the shapes of the first call; another shape compiles again, unless it `is_dynamic`."""
        compiled = torch.compile(function, dynamic=is_dynamic, fullgraph=True)

        def call(*arguments: Any) -> R:
            try:
                return compiled(*arguments)
            except RuntimeError as error:  # Dynamo wraps what a pass raises
                if self.counter.refusal:
                    raise self.counter.refusal from error
                raise

        return call


def _forget_secrets() -> None:
    """Take variables that hold a password or a token out of this process, where torch would store them: with each graph
    that it compiles goes a script that repeats it, which begins with all variables of such names.
    """
    for name, value in list(os.environ.items()):
        if any(part in name for part in _STORED_VARIABLES) and is_secret(name, value):
            logger.warning(
                "%s holds a password or a token: workers do without it, or graphs would be stored with it", name
            )
            del os.environ[name]


def _is_cache_filled() -> bool:
    """Is this process given graphs that another one compiled?"""
    return CACHE_VARIABLE in os.environ and any(Path(os.environ[CACHE_VARIABLE]).glob("*"))


def _name_header(header: str, *_: Any, **__: Any) -> str:
    """The header as it is, which g++ finds among those of torch: a kernel that has to be compiled takes longer."""
    return header


def _is_loadable(self: torch._inductor.cpu_vec_isa.VecISA, output_path: str) -> bool:
    """Does the library load? In this process: it only names functions of torch's, which is there, and runs none."""
    try:
        ctypes.CDLL(output_path)
    except OSError:
        return False
    return True


class CompileCounter(CustomGraphPass):
    """An Inductor pass that changes nothing and counts: it runs when a graph is compiled, not when it is found.

    Inductor's own counters also call "hit" a graph whose machine code it then builds anew. The pass has a fixed
    `uuid`, so it is part of every cache key in the same way in the compiler and in the trainer.
    """

    def __init__(self) -> None:
        self.graphs_compiled = 0
        self.is_forbidden = False
        self.refusal: DeviceError | None = None

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        self.graphs_compiled += 1
        if self.is_forbidden:
            self.refusal = DeviceError(
                "a graph is not in the compile cache and compile.require_warm is set. The cache was made for another "
                "step; run the compiler stage again, or set --compile.require_warm=false to compile here."
            )
            raise self.refusal

    def uuid(self) -> str:
        return "millrace-compile-counter"
