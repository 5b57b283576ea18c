"""The compiler of TorchNeuron, which makes a file of a graph for NeuronCores, and a counter of the files that it adds.

What is documented: the name of the compiler in `torch.compile`, that shapes are static, and that a graph runs whole or
not at all (https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html). The
folder of compiled graphs is named in a public copy of TorchNeuron's source from before its beta. None of it has run on
a NeuronCore.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo.config
import torch._dynamo.utils

from services.common.program.backends.neuron_facts import CACHE_VARIABLE
from services.common.program.backends.warm_cache import missing_graph

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
        self._is_forbidden = False
        torch._dynamo.config.recompile_limit = max(MOST_SHAPES, torch._dynamo.config.recompile_limit)

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        """Compile a function for the shapes of each call, also where it may be called with several (`is_dynamic`):
        TorchNeuron refuses dynamic shapes.
        """
        compiled = torch.compile(function, backend=NEURON, dynamic=False, fullgraph=True)

        def call(*arguments: Any) -> R:
            result = compiled(*arguments)
            if self._is_forbidden:
                self._require_known_graphs()
            return result

        return call

    def forbid_compilation(self) -> None:
        """Raise `DeviceError` in the first call from now on that adds a file to the cache."""
        self._is_forbidden = True

    @property
    def graphs_compiled(self) -> int:
        return self._count_files() - self._num_known

    def _require_known_graphs(self) -> None:
        num_traced = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if num_traced == self._num_traced:  # no graph is new, so the folder need not be read
            return
        self._num_traced = num_traced
        if self.graphs_compiled:
            raise missing_graph()

    def _count_files(self) -> int:
        return sum(path.is_file() for path in self._folder.rglob("*")) if self._folder else 0
