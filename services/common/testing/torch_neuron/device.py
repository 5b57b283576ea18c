"""A stand-in for TorchNeuron: a torch device `neuron` whose operations run on this machine's CPU.

It is made from Python (`torch.utils.backend_registration`), and is as strict as TorchNeuron is documented to be. So the
program's path for trn2 and trn3 runs in tests without the hardware. The device refuses what TorchNeuron refuses or
computes in another way:

- an operation over tensors of the host and of the device, besides copies and 0-dimensional numbers of the host;
- float64 and complex tensors, and int64 values beyond 32 bits, which TorchNeuron would cut;
- every operation outside of a graph that is not in KNOWN, among them random numbers, which a CPU would draw otherwise,
  shapes that depend on values, and fused kernels that ignore some of their arguments;
- inside `forbidding_host_reads`, every read of the device by the host.

In one respect it is not as strict: the device has number 0 in every process, where TorchNeuron's is LOCAL_RANK. So the
program may give the device no number.

A tensor of the device has memory of its own size, which a CPU tensor shares: an operation is called with these CPU
tensors, and so has the bits of the CPU.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from services.common.program.backends.neuron_facts import is_compile_only

NAME = "neuron"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_METADATA_OPERATIONS = ("as_strided", "set_.source_Storage_storage_offset")
"""Operations on sizes, strides and storages alone, whose CPU kernels serve every device."""
_NUMBER_LIMIT = 2**31
_NAMES = """
    _log_softmax _log_softmax_backward_data _reshape_alias _softmax _softmax_backward_data abs add all amax arange
    bitwise_and bmm cat clamp div embedding_dense_backward empty empty_strided eq exp fill_ ge index index_select
    isfinite isneginf le linalg_vector_norm log logical_not lt masked_fill_ max mean min mm mul ne neg
    nll_loss_backward nll_loss_forward pow reciprocal rsqrt sigmoid silu sqrt sub sum view where zero_
"""
KNOWN = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Operations, without their overloads, that the program calls outside of graphs and TorchNeuron is known to run.

A public copy of TorchNeuron's source from before its beta has them, besides the views. Any other one might be computed
on the host. Before you add one, look it up in TorchNeuron's documentation, or call `torch_neuronx.get_fallback_ops()`.
"""
_NARROWED = ("matmul", "linear", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
"""Operations that autocast computes in its narrow type, of those that the CPU's autocast narrows."""
_WIDENED = ("cross_entropy_loss", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits")
"""Operations that autocast computes in float32, of those that the CPU's autocast widens."""


class UnsupportedOnNeuron(NotImplementedError):
    """An operation that TorchNeuron does not run, or runs with another result."""


class NeuronModule(ModuleType):
    """The module `torch.neuron`: one device a process, as the runtime sees it."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self.operations: collections.Counter[str] = collections.Counter()
        """Number of calls of each operation on the device."""
        self.are_reads_forbidden = False
        self.is_in_graph = False
        """Whether the operations that run now are those of a compiled graph."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 0 if is_compile_only(os.environ) else 1

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_libraries: list[torch.library.Library] = []
"""The kernels of the device. They are removed with their library."""


def install() -> bool:
    """Register the device with torch in this process. Returns whether this call did it: a second one does nothing."""
    if _libraries:
        return False
    module = NeuronModule()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    aten, fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend([aten, fallback])
    for name in _METADATA_OPERATIONS:
        aten.impl(name, _metadata_kernel(name), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    aten.impl("_local_scalar_dense", _read_number, "PrivateUse1")
    fallback.fallback(_run, "PrivateUse1")
    autocast = torch.library.Library("_", "IMPL")
    _libraries.append(autocast)
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, dtype in [*((each, None) for each in _NARROWED), *((each, torch.float32) for each in _WIDENED)]:
        aten.impl(name, _autocast_kernel(name, dtype), "AutocastPrivateUse1")
    return True


def library() -> torch.library.Library:
    """Return the library of the device's kernels, to which other modules add theirs."""
    return _libraries[0]


def device_module() -> NeuronModule:
    """Return the device's module, which counts its operations."""
    module: NeuronModule = torch.get_device_module(NAME)
    return module


@contextmanager
def forbidding_host_reads() -> Iterator[None]:
    """Refuse reads of the device by the host during the block, for which a step would wait."""
    module = device_module()
    module.are_reads_forbidden = True
    try:
        yield
    finally:
        module.are_reads_forbidden = False


def on_cpu(x: Tensor) -> Tensor:
    """Return the CPU tensor that shares the memory of a tensor of the device."""
    shared: Any = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(shared.cpu, x.storage_offset(), x.size(), x.stride())


def on_device(x: Tensor, memory: Any = None) -> Tensor:
    """Return the tensor of the device that shares the memory of a CPU tensor.

    `memory` is that memory on the device, where a tensor of the device has it already.
    """
    _require_supported(x)
    tensor = torch._C._acc.create_empty_tensor((0,), x.dtype)
    return tensor.set_(memory or _memory_of(x), x.storage_offset(), x.size(), x.stride())


def _memory_of(x: Tensor) -> Any:
    """Return a storage of the device over the memory of a CPU tensor, which lives as long as the storage."""
    on_host, device = x.untyped_storage(), torch.device(NAME, 0)
    memory: Any = torch._C._construct_storage_from_data_pointer(on_host.data_ptr(), device, on_host.nbytes())
    memory.cpu = on_host
    return memory


def _metadata_kernel(name: str) -> Any:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *arguments, **options: operation.redispatch(_CPU, *arguments, **options)


def _autocast_kernel(name: str, dtype: torch.dtype | None) -> Any:
    """Return the kernel that casts an operation's float tensors, to autocast's type where there is no `dtype`."""
    operation = getattr(torch.ops.aten, name).default
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

    def cast(x: Tensor) -> Tensor:
        is_eligible = x.is_floating_point() and x.device.type == NAME
        return x.to(dtype or torch.get_autocast_dtype(NAME)) if is_eligible else x

    def run(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            arguments, options = tree_map_only(Tensor, cast, (arguments, options))
            return operation(*arguments, **options)

    return run


def _run(operation: Any, *arguments: Any, **options: Any) -> Any:
    """Run an operation of the device by the CPU's kernel, on the same memory."""
    name = operation.name()
    if name.partition(".")[0] not in KNOWN and not device_module().is_in_graph:
        raise UnsupportedOnNeuron(f"{name}: TorchNeuron is not known to run it, and would compute it on the host")
    device_module().operations[name] += 1
    given: dict[int, tuple[Tensor, Tensor]] = {}
    """The tensors of the device and those of the CPU that share their memory, by the number of the latter."""

    def unwrap(x: Tensor) -> Tensor:
        if x.device.type == NAME:
            raw = on_cpu(x)
            given[id(raw)] = (x, raw)
            return raw
        if x.dim() > 0:
            raise UnsupportedOnNeuron(f"{name}: a tensor {list(x.shape)} of {x.device} beside one of the device")
        return x

    raw_arguments, raw_options = tree_map_only(Tensor, unwrap, (arguments, options))
    if raw_options.get("device") is not None:
        _require_own(torch.device(raw_options["device"]))
        raw_options["device"] = torch.device("cpu")
    memories = {raw.untyped_storage()._cdata: x.untyped_storage() for x, raw in given.values()}

    def wrap(raw: Tensor) -> Tensor:
        if id(raw) in given:
            return given[id(raw)][0]
        if not name.startswith("aten::empty"):  # whose numbers are those that the memory had
            _require_small_numbers(raw)
        return on_device(raw, memories.get(raw.untyped_storage()._cdata))

    result = tree_map_only(Tensor, wrap, operation(*raw_arguments, **raw_options))
    for x, raw in given.values():
        if x.size() != raw.size():  # a result that was given without its size
            x.set_(_memory_of(raw), raw.storage_offset(), raw.size(), raw.stride())
    return result


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _require_readable(target)
    _require_supported(source)
    raw_source, raw_target = (on_cpu(x) if x.device.type == NAME else x for x in (source, target))
    _require_small_numbers(raw_source)
    raw_target.copy_(raw_source)
    return target


def _to_copy(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    raw = on_cpu(x) if x.device.type == NAME else x
    target = torch.device(device) if device is not None else x.device
    _require_own(target)
    if target.type != NAME:
        _require_readable(torch.empty(0, device=target))
    copy = torch.ops.aten._to_copy.default(raw, dtype=dtype, memory_format=memory_format)
    _require_small_numbers(copy)
    return on_device(copy) if target.type == NAME else copy


def _read_number(x: Tensor) -> Any:
    _require_readable(torch.empty(0))
    return on_cpu(x).item()


def _require_own(device: torch.device) -> None:
    """Refuse a device of another worker: a process has the one of its LOCAL_RANK, which is number 0 here."""
    if device.type == NAME and device.index not in (None, 0, int(os.environ.get("LOCAL_RANK", "0"))):
        raise UnsupportedOnNeuron(f"{device} is asked for, and this process has the device of its LOCAL_RANK alone")


def _require_readable(target: Tensor) -> None:
    if target.device.type != NAME and device_module().are_reads_forbidden:
        raise UnsupportedOnNeuron("the host reads the device within a step, for which the device would wait")


def _require_supported(x: Tensor) -> None:
    if x.dtype == torch.float64 or x.is_complex():
        raise UnsupportedOnNeuron(f"a tensor {list(x.shape)} of {x.dtype}, which TorchNeuron computes in 32 bits")


def _require_small_numbers(x: Tensor) -> None:
    if x.dtype == torch.int64 and x.numel() and int(x.abs().max()) >= _NUMBER_LIMIT:
        raise UnsupportedOnNeuron(f"a tensor {list(x.shape)} of int64 has numbers beyond 32 bits")
