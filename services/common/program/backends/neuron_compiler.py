"""The compiler of TorchNeuron, which makes a file of a graph for NeuronCores, and a counter of the files that it adds.

What is documented: the name of the compiler in `torch.compile`, that shapes are static, and that `fullgraph` works
(https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/compile/reference-torch-compile.html). A public
copy of TorchNeuron's source from before its beta names the folder of compiled graphs, and starts `neuronx-cc` from PATH
for each graph that the folder does not hold. None of it has run on a NeuronCore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo.config
from torch import Tensor

from services.common.program.backends.compiler_shim import CompilerShim, make_shim
from services.common.program.backends.neuron_facts import CACHE_VARIABLE
from services.common.program.backends.warm_cache import missing_graphs, name_of
from services.common.program.backends.whole_graph import compile_whole

R = TypeVar("R")

NEURON = "neuron"
MAX_SHAPES = 64
"""Shapes for which one function may be compiled: the update is compiled for each length of a bucket's blocks."""


class NeuronCompiler:
    """Compiles functions for the shapes of their calls, and counts the graphs that the cache did not hold."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[CACHE_VARIABLE]) if CACHE_VARIABLE in os.environ else None
        self._num_known = self._count_files()
        self._shim: CompilerShim | None = None
        torch._dynamo.config.recompile_limit = max(MAX_SHAPES, torch._dynamo.config.recompile_limit)

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        """Compile a function for the shapes of each call, also where it may be called with several (`is_dynamic`):
        TorchNeuron refuses dynamic shapes.
        """
        compiled = compile_whole(function, backend=NEURON, dynamic=False)
        known: set[tuple[torch.Size, ...]] = set()

        def call(*arguments: Any) -> R:
            if self._shim is None:
                return compiled(*arguments)
            shapes = tuple(each.shape for each in arguments if isinstance(each, Tensor))
            with self._refusing(self._shim, f"a graph of {name_of(function)}", is_new=shapes not in known):
                result = compiled(*arguments)
            known.add(shapes)
            return result

        return call

    def forbid_compilation(self) -> None:
        """Raise `DeviceError` in the first call from now on that needs a graph which the cache does not hold.

        Operations outside of compiled functions go on to compile: TorchNeuron may keep files of these too, of which
        those of collectives are in no trace.
        """
        self._shim = make_shim()

    @property
    def graphs_compiled(self) -> int:
        return self._count_files() - self._num_known

    @contextmanager
    def _refusing(self, shim: CompilerShim, graph: str, is_new: bool) -> Iterator[None]:
        """Raise `DeviceError` where neuronx-cc is started in the block, or a compiler that does not come from PATH adds
        a file.
        """
        num_files = self._count_files() if is_new else 0
        try:
            with shim.first_on_path():
                yield
        except RuntimeError as error:
            if shim.refusal():
                raise missing_graphs([graph]) from error
            raise
        if is_new and self._count_files() > num_files:
            raise missing_graphs([graph])

    def _count_files(self) -> int:
        return sum(path.is_file() for path in self._folder.rglob("*")) if self._folder else 0
