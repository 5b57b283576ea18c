"""The stand-in's compiler: the backend `neuron` of `torch.compile` keeps a file of each graph, and runs it on the CPU.

It is as strict as TorchNeuron's: shapes are static, and an operation that the device refuses is refused in a graph too.
A collective of a graph lists the ranks of this process's own group, so that workers of other groups have other graphs.
A graph that the cache lacks is compiled by the `neuronx-cc` that PATH has, which copies it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from services.common.program.backends.neuron_facts import (
    CACHE_VARIABLE,
    CORE_SIZE_VARIABLE,
    FLAGS_VARIABLE,
    TARGET_VARIABLE,
    is_compile_only,
)
from services.common.testing.torch_neuron.device import UnsupportedOnNeuron, device_module

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

COMPILER = "neuronx-cc"
TARGET = "trn2"
"""Family of instances that the stand-in's device tells."""
_FORBIDDEN = (
    *("all_to_all", "_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor"),
    *("_fused_adamw", "rand", "normal", "uniform", "bernoulli", "dropout"),
)
"""Parts of the names of operations that a graph must not have."""
_GROUP_ARGUMENTS = {"all_reduce": 2, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 3}
"""Position of the group's name in the arguments of each collective."""


def _compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile the graph unless the cache has its file, and return the function that runs the graph."""
    flags = [os.environ.get(name, "") for name in (FLAGS_VARIABLE, CORE_SIZE_VARIABLE)]
    text = "\n".join(_describe(node) for node in graph.graph.nodes)
    target = _find_target()
    if CACHE_VARIABLE in os.environ:
        key = hashlib.sha256(f"{text}{target}{flags}".encode()).hexdigest()
        path = Path(os.environ[CACHE_VARIABLE]) / key[:2] / key[2:4] / f"{key}.neff"
        if not path.exists():
            _run_compiler(text, target, path)
    return make_boxed_func(_without_running(graph) if is_compile_only(os.environ) else _running(graph))


NEURON = aot_autograd(fw_compiler=_compile, bw_compiler=_compile)
"""The backend of `torch.compile`, which the package names to torch."""


def _describe(node: fx.Node) -> str:
    found = [each for each in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
    for each in found:
        if any(isinstance(size, torch.SymInt) for size in each.shape):
            raise UnsupportedOnNeuron(f"{node}: a shape {tuple(each.shape)} that is not static")
    if any(name in str(node.target) for name in _FORBIDDEN):
        raise UnsupportedOnNeuron(f"{node.target} in a graph")
    arguments = list(node.args)
    if str(node.target).startswith("_c10d_functional."):
        at = _GROUP_ARGUMENTS.get(str(node.target).split(".")[1])
        if at is not None:
            arguments[at] = [_ranks_of(str(arguments[at]))]
    shapes = [(tuple(each.shape), str(each.dtype), each.device.type) for each in found]
    return f"{node.op} {node.name} {node.target} {arguments} {node.kwargs} {shapes}"


def _ranks_of(name: str) -> list[int]:
    """Return the ranks of a group. TorchNeuron would take all workers for a group that it cannot find."""
    try:
        return dist.get_process_group_ranks(torch._C._distributed_c10d._resolve_process_group(cast("GroupName", name)))
    except (RuntimeError, KeyError, ValueError) as error:
        raise UnsupportedOnNeuron(f"a graph with the process group {name!r}, whose ranks are unknown") from error


def _find_target() -> str:
    if TARGET_VARIABLE not in os.environ and is_compile_only(os.environ):
        raise UnsupportedOnNeuron(f"a compilation without a device and without {TARGET_VARIABLE}")
    return os.environ.get(TARGET_VARIABLE, TARGET)


def _run_compiler(text: str, target: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        graph, output = Path(folder, "module.mlir"), Path(folder, "module.neff")
        graph.write_text(text, encoding="utf-8")
        command = [COMPILER, "compile", str(graph), "--framework", "XLA", "--target", target, "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"Command failed ({COMPILER} compilation) with exit code {done.returncode}: {done.stderr}"
            )
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(output.read_bytes())
        temporary.replace(path)


def _running(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return the function that runs the graph's operations, which the compiler, and no kernel of the device, has."""
    module = device_module()

    def run(*inputs: Any) -> Any:
        module.is_in_graph = True
        try:
            return graph.forward(*inputs)
        finally:
            module.is_in_graph = False

    return run


def _without_running(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return a function with results of the graph's shapes, and zeros in place of values."""
    [output] = graph.graph.find_nodes(op="output")

    def run(*inputs: Any) -> Any:
        def zeros(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            made = value.meta["val"]
            return torch.zeros(made.shape, dtype=made.dtype, device=made.device) if isinstance(made, Tensor) else made

        return tuple(map(zeros, output.args[0]))

    return run
