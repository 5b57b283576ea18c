"""The stand-in's compiler: the backend `neuron` of `torch.compile` keeps a file of each graph, and runs it on the CPU.

It is as strict as TorchNeuron's: shapes are static, and an operation that the device refuses is refused in a graph too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from services.common.program.backends.neuron_facts import CACHE_VARIABLE
from services.common.testing.torch_neuron.device import NAME, UnsupportedOnNeuron

_FORBIDDEN = ("all_to_all", "_local_scalar_dense", "nonzero", "masked_select", "_fused_adamw")


def register() -> None:
    """Make `torch.compile` know the backend."""
    torch._dynamo.register_backend(aot_autograd(fw_compiler=_compile, bw_compiler=_compile), name=NAME)


def _compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Write the graph's file unless the cache has it, and return the function that runs the graph."""
    lines = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        found = [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        for each in found:
            if any(isinstance(size, torch.SymInt) for size in each.shape):
                raise UnsupportedOnNeuron(f"{node}: a shape {tuple(each.shape)} that is not static")
        if any(name in str(node.target) for name in _FORBIDDEN):
            raise UnsupportedOnNeuron(f"{node.target} in a graph")
        shapes = [(tuple(each.shape), str(each.dtype), each.device.type) for each in found]
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {shapes}")
    text = "\n".join(lines)
    if CACHE_VARIABLE in os.environ:
        key = hashlib.sha256(f"{text}{os.environ.get('NEURON_CC_FLAGS', '')}".encode()).hexdigest()
        path = Path(os.environ[CACHE_VARIABLE]) / key[:2] / f"{key}.neff"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
    return make_boxed_func(graph.forward)
