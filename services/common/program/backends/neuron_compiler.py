"""The compiler of TorchNeuron, which makes a file of a graph for NeuronCores, and a counter of the files that it adds.

What is documented: the name of the compiler in `torch.compile`, that shapes are static, and that `fullgraph` works
(https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html). A public
copy of TorchNeuron's source from before its beta names the folder of compiled graphs, and starts `neuronx-cc` from PATH
for each graph that the folder does not hold. None of it has run on a NeuronCore.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch._dynamo.config
import torch._dynamo.utils

from services.common.program.backends.compiler_shim import CompilerShim, forbid_compiler
from services.common.program.backends.neuron_facts import CACHE_VARIABLE
from services.common.program.backends.warm_cache import graph_of, missing_graphs
from services.common.program.backends.whole_graph import compile_whole

R = TypeVar("R")

NEURON = "neuron"
MOST_SHAPES = 64
"""Shapes for which one function may be compiled: the update is compiled for each length of a bucket's blocks."""


class NeuronCompiler:
    """Compiles functions for the shapes of their calls, and counts the graphs that the cache did not hold."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[CACHE_VARIABLE]) if CACHE_VARIABLE in os.environ else None
        self._num_known = self._count_files()
        self._num_traced = 0
        self._shim: CompilerShim | None = None
        torch._dynamo.config.recompile_limit = max(MOST_SHAPES, torch._dynamo.config.recompile_limit)

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        """Compile a function for the shapes of each call, also where it may be called with several (`is_dynamic`):
        TorchNeuron refuses dynamic shapes.
        """
        compiled = compile_whole(function, backend=NEURON, dynamic=False)

        def call(*arguments: Any) -> R:
            try:
                result = compiled(*arguments)
            except RuntimeError as error:
                if self._shim and self._shim.refusal():
                    raise missing_graphs([graph_of(function)]) from error
                raise
            if self._shim and self._has_new_graph():  # of a compiler that does not come from PATH
                raise missing_graphs([graph_of(function)])
            return result

        return call

    def forbid_compilation(self) -> None:
        """Raise `DeviceError` in the first call from now on that needs a graph which the cache does not hold."""
        self._shim = forbid_compiler()

    @property
    def graphs_compiled(self) -> int:
        return self._count_files() - self._num_known

    def _has_new_graph(self) -> bool:
        num_traced = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if num_traced == self._num_traced:  # no graph was traced, so the folder need not be read
            return False
        self._num_traced = num_traced
        return self.graphs_compiled > 0

    def _count_files(self) -> int:
        return sum(path.is_file() for path in self._folder.rglob("*")) if self._folder else 0
