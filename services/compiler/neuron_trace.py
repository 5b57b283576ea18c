"""Traces the program's graphs on torch_xla, in the layout of libneuronxla's cache (see `modules`).

libneuronxla itself can keep the graphs of a process: on a node with a NeuronCore, and perhaps on any node. Where
libneuronxla is not installed, `TracedXla` traces the graphs of one worker: nothing is computed, and the model takes no
memory, because its state is placeholders. Its graphs differ from the device's in two ways: `torch_xla.sync` adds which
inputs an output may overwrite, and the keys are torch_xla's. So they show the number and sizes of the graphs, and
whether workers share them. A trainer on a device refuses a cache of them, because its libraries are different.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.program.backends.neuron_xla import NeuronXla
from services.common.program.backends.xla_environment import CACHE_VARIABLE, CPU, NEURON, PJRT_VARIABLE
from services.common.program.mesh import Mesh
from services.compiler.modules import COMPILER_PREFIX, DONE, FLAGS, GRAPH, NEFF
from services.compiler.neuronx_cc import COMPILER, NO_COMPILER, compiler_version

PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Environment variable with the Neuron platform that graphs are made for, on a node without a Neuron device."""
TARGET = "--target="
KEEP_GRAPHS = {
    # From AWS Neuron's neuron_parallel_compile: graphs are written to the cache, and their results are zeros.
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
    "NEURON_RT_VISIBLE_CORES": "0",
}
"""Environment variables with which libneuronxla keeps the graphs of a process, and compiles none."""


class KeptXla(NeuronXla):
    """Backend that lets libneuronxla keep the graphs, on a node without a NeuronCore.

    Whether libneuronxla's plugin opens without a device has not been tried: docs/operations/first-trainium-run.md,
    point 1.
    """

    def __init__(self, mesh: Mesh, threads: int, flags: Sequence[str]) -> None:
        os.environ.update(KEEP_GRAPHS)
        os.environ.setdefault(PLATFORM_VARIABLE, _target_of(flags))
        super().__init__(mesh, threads, "fast")

    def _claim_device(self) -> None:
        os.environ.setdefault(PJRT_VARIABLE, NEURON)


class TracedXla(NeuronXla):
    """Backend of a worker without a device: writes every graph to the cache that the environment names, and replaces
    the graph's results by placeholders.
    """

    host = torch.device("meta")

    def __init__(self, mesh: Mesh, threads: int, flags: Sequence[str] = ()) -> None:
        self.met: list[str] = []
        """Keys of all graphs in the order of execution, with repetitions: torch_xla's hashes in hexadecimal."""
        self.graphs: dict[str, bytes] = {}
        """Serialized HloModuleProto of every graph by key, in the order of first execution."""
        self._flags, self._graphs_kept = list(flags), 0
        super().__init__(mesh, threads, "fast")
        self._builder = self._xla.core.xla_builder

    def _claim_device(self) -> None:
        """Open torch_xla's CPU in the place of a NeuronCore, and name the platform that graphs are made for."""
        os.environ.setdefault(PJRT_VARIABLE, CPU)
        if not self._why_without_nxd:  # its topology and its kernels ask torch_neuronx for the platform
            os.environ.setdefault(PLATFORM_VARIABLE, _target_of(self._flags))

    def place(self, x: Tensor) -> Tensor:
        """Move a tensor to the device; a tensor without values becomes a placeholder."""
        return self._placeholder(x) if x.is_meta else x.to(self.device)

    def to_host(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device=self.host)

    def end_graph(self) -> None:
        lazy, pending = self._xla._XLAC, self._pending_tensors()
        if pending:
            key = lazy._get_graph_hash(pending).hex()
            self.met.append(key)
            if key not in self.graphs:
                self.graphs[key] = lazy._get_xla_tensors_hlo_proto(pending)
                self._keep(key)
        with torch.no_grad():
            for tensor in pending:
                tensor.copy_(self._placeholder(tensor))
        # As torch_xla's `sync` does: collectives are chained, and the next graph would contain those of this one.
        lazy._set_all_reduce_token(str(self.device), None)

    def graphs_compiled(self) -> int:
        return self._graphs_kept

    def _keep(self, key: str) -> None:
        """Write a graph to the cache unless the cache holds it compiled."""
        if CACHE_VARIABLE not in os.environ:
            return
        flags = hashlib.md5(json.dumps(self._flags).encode(), usedforsecurity=False).hexdigest()[:8]
        compiler = compiler_version() if shutil.which(COMPILER) else NO_COMPILER
        folder = Path(os.environ[CACHE_VARIABLE], f"{COMPILER_PREFIX}{compiler}", f"MODULE_{key}+{flags}")
        if (folder / NEFF).is_file() and (folder / DONE).is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / GRAPH).write_bytes(self.graphs[key])
        (folder / FLAGS).write_text(json.dumps(self._flags), encoding="utf-8")
        self._graphs_kept += 1

    def _placeholder(self, x: Tensor) -> Tensor:
        return self._builder.create_placeholder_tensor(tuple(x.shape), x.dtype)

    def _pending_tensors(self) -> list[Tensor]:
        """Return all live tensors that are not computed yet, in the order of their creation: the graph's outputs."""
        lazy = self._xla._XLAC
        tensors = [each for each in gc.get_objects() if _is_tensor(each) and each.device.type == "xla"]
        is_pending = lazy._check_tensor_need_materialization(tensors) if tensors else []
        alive = zip(tensors, is_pending, strict=True)
        found = {lazy._xla_get_tensor_id(tensor): tensor for tensor, is_here in alive if is_here}
        return [found[number] for number in sorted(found)]


def _target_of(flags: Sequence[str]) -> str:
    """Return the value of the flag `--target=`, or trn1."""
    return next((flag for flag in flags if flag.startswith(TARGET)), f"{TARGET}trn1").removeprefix(TARGET)


def _is_tensor(candidate: Any) -> bool:
    # isinstance would make lazy objects of other libraries load their class.
    return issubclass(type(candidate), Tensor)
