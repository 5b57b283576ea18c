"""The graphs that the program has on torch_xla, traced on a CPU as any one worker of a topology.

Nothing is computed, and nothing of the model is in memory: its state is placeholders. The graphs are those that the
device is asked for, up to what `torch_xla.sync` adds to one (which of its inputs an output may overwrite), so they tell
how many there are and whether workers share them. Which key a cache has them under, the device's own library knows.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.common.program.backends.neuron_xla import NeuronXla
from services.common.program.mesh import Mesh


@dataclass(frozen=True)
class Graph:
    key: str
    """Torch_xla's hash of the graph. Hexadecimal."""
    phase: str
    """In which it was met first."""
    hlo: bytes = field(repr=False)
    """An HloModuleProto."""
    num_outputs: int


class TracedXla(NeuronXla):
    """The backend of a worker whose device does not exist: a graph that ends is kept, and what it would have computed
    is placeholders.
    """

    host = torch.device("meta")

    def __init__(self, mesh: Mesh, threads: int) -> None:
        self.graphs: dict[str, Graph] = {}
        """By key, in the order in which they were met."""
        self.met: list[tuple[str, str]] = []
        """Phase and key of every graph that ended."""
        self.phase = ""
        super().__init__(mesh, threads, "fast")
        self._builder = self._xla.core.xla_builder

    def place(self, x: Tensor) -> Tensor:
        """A placeholder for what has no values; what has is placed."""
        return self._placeholder(x) if x.is_meta else x.to(self.device)

    def to_host(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="meta")

    def end_graph(self) -> None:
        lazy = self._xla._XLAC
        pending = self._pending_tensors()
        if pending:
            key = lazy._get_graph_hash(pending).hex()
            self.met.append((self.phase, key))
            if key not in self.graphs:
                self.graphs[key] = Graph(key, self.phase, lazy._get_xla_tensors_hlo_proto(pending), len(pending))
        with torch.no_grad():
            for tensor in pending:
                tensor.copy_(self._placeholder(tensor))
        # As `sync` does: collectives are chained, and the next graph would contain this one.
        lazy._set_all_reduce_token(str(self.device), None)

    def _placeholder(self, x: Tensor) -> Tensor:
        created: Tensor = self._builder.create_placeholder_tensor(tuple(x.shape), x.dtype)
        return created

    def _pending_tensors(self) -> list[Tensor]:
        """All tensors that are alive and not computed, in the order in which they were made: a graph's outputs."""
        lazy = self._xla._XLAC
        tensors = [each for each in gc.get_objects() if _is_tensor(each) and each.device.type == "xla"]
        is_pending = lazy._check_tensor_need_materialization(tensors) if tensors else []
        found = {
            lazy._xla_get_tensor_id(each): each for each, is_here in zip(tensors, is_pending, strict=True) if is_here
        }
        return [found[number] for number in sorted(found)]


def _is_tensor(candidate: Any) -> bool:
    return issubclass(type(candidate), Tensor)
