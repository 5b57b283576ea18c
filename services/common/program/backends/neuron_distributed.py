"""What neuronx-distributed (NxD) 0.18 alone has: attention as a NKI kernel, and which ranks of a topology are joined.

Its layers stay out: each rank of a model would trace another graph. Nothing of it is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from services.common.errors import DeviceError
from services.common.program.mesh import Axis, Mesh

LIBRARY = "neuronx_distributed"
LOGICAL_CORE_SIZE = "NEURON_LOGICAL_NC_CONFIG"
"""Physical cores that a worker's is made of, where the runtime is told: of trn1 it is one."""
SEQUENCE_MULTIPLE = 2048
MAX_HEAD_DIM = 128


def is_installed() -> bool:
    """Whether NxD is here. Does not import it."""
    return importlib.util.find_spec(LIBRARY) is not None


def logical_core_size() -> int:
    return int(os.environ.get(LOGICAL_CORE_SIZE, "1"))


class FlashAttention:
    """Causal attention by the kernel of `neuronx_distributed.kernels.flash_attn`, which holds no [S, S] scores."""

    def __init__(self, kernel: Callable[..., Tensor], hardware: object, core_size: int = 1) -> None:
        """`kernel` is NxD's `nki_flash_attn_func`, `hardware` one of its enumeration."""
        self._kernel, self._hardware, self._core_size = kernel, hardware, core_size

    @classmethod
    def load(cls) -> Self:
        """Raises `DeviceError` where NxD is installed and cannot be imported."""
        core_size, hardware = logical_core_size(), _import("utils.utils").hardware
        # Not asked of the platform, which a node that only traces cannot say. The kernel's form follows from the size.
        platform = hardware.TRN1 if core_size == 1 else hardware.TRN2
        return cls(_import("kernels.flash_attn").nki_flash_attn_func, platform, core_size)

    def __call__(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor) -> Tensor:
        """[B, H, S, N], of what `why_not_flash` has nothing against."""
        # NxD starts the kernel once for each query head, and each takes the key-value head of its own number: with
        # fewer of them it would read what lies behind them.
        copies = q_BHSN.shape[1] // k_BKSN.shape[1]
        mixed_BHSN: Tensor = self._kernel(
            q_BHSN,
            _repeat_heads(k_BKSN, copies),
            _repeat_heads(v_BKSN, copies),
            lnc=self._core_size,
            softmax_scale=q_BHSN.shape[-1] ** -0.5,
            causal=True,
            mixed_precision=True,  # float32 where nothing is multiplied, and in sums
            hardware_type=self._hardware,
            transpose_nki_inputs=False,  # they are [B, H, S, N]; True is for [B, H, N, S]
        )
        return mixed_BHSN


def why_not_flash(q_BHSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> str:
    """What speaks against the kernel for tensors of these shapes and types; empty where nothing does."""
    _, num_heads, length, head_dim = q_BHSN.shape
    if mask_B1SS is not None:
        return "tokens attend within their documents, and the kernel knows no documents"
    if length % SEQUENCE_MULTIPLE:
        return f"a sequence has {length:,} positions, and the kernel takes multiples of {SEQUENCE_MULTIPLE:,}"
    if head_dim > MAX_HEAD_DIM:
        return f"a head has {head_dim} dimensions, and the kernel takes at most {MAX_HEAD_DIM}"
    if v_BKSN.dtype != torch.bfloat16:
        return f"the kernel multiplies in bfloat16, and train.dtype is {str(v_BKSN.dtype).removeprefix('torch.')}"
    if num_heads % logical_core_size():
        return f"{num_heads} heads of a worker cannot be shared by the {logical_core_size()} cores that are its one"
    return ""


def require_groups(mesh: Mesh) -> None:
    """Raise `DeviceError` unless the groups of this worker's collectives are those that NxD chooses for its nodes.

    NxD knows which cores are joined by links: on trn1 the 4 of a group are not those that follow one another, and on
    trn2 the halves of some groups lie in other rows of chips. Asks for lists alone; no device and no group is made.
    """
    if mesh.world_size == 1:
        return
    parallel_state = _import("parallel_layers.parallel_state")
    chosen = parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tensor_parallel_size,
        skip_collective_init=True,
        lnc_size=logical_core_size(),
        mesh_only=True,
    )
    copies = parallel_state.arrange_kv_groups(
        mesh.data_parallel_size,
        mesh.tensor_parallel_size,
        mesh.key_value_copies,
        hardware_type=parallel_state._HARDWARE_TYPE,
    )
    theirs: dict[Axis, list[list[int]]] = {"tensor": chosen.tp_groups, "data": chosen.dp_groups, "key_value": copies}
    require_equal_groups(mesh, theirs, platform=str(parallel_state._HARDWARE_TYPE.value))


def require_equal_groups(mesh: Mesh, theirs: Mapping[Axis, Sequence[Sequence[int]]], platform: str) -> None:
    """Raise `DeviceError` that names both, where the ranks along an axis of the mesh are others than `theirs`."""
    for axis, their_groups in theirs.items():
        ours = mesh.groups(axis)
        if sorted(map(list, their_groups)) != sorted(ours):
            raise DeviceError(
                f"parallel.tensor_parallel_size = {mesh.tensor_parallel_size} on {mesh.world_size} workers of "
                f"{platform}: the groups of the {axis} axis are {_show(ours)} here, and neuronx-distributed chooses "
                f"{_show(their_groups)}, by the links between cores. Choose another size, of 8 or 32 on trn1: "
                f"--parallel.tensor_parallel_size=8"
            )


def _show(groups: Sequence[Sequence[int]]) -> str:
    shown = ", ".join(str(list(group)) for group in groups[:2])
    return f"[{shown}, ...]" if len(groups) > 2 else f"[{shown}]"


def _repeat_heads(x_BKSN: Tensor, copies: int) -> Tensor:
    if copies == 1:
        return x_BKSN
    return x_BKSN.unsqueeze(2).expand(-1, -1, copies, -1, -1).flatten(1, 2)


def _import(module: str) -> Any:
    os.environ.setdefault("NXD_LOG_LEVEL", "warning")  # it would print every group of the topology
    try:
        return importlib.import_module(f"{LIBRARY}.{module}")
    except Exception as error:  # whatever of five Neuron packages does not fit: no other attention instead
        raise DeviceError(
            f"{LIBRARY} is installed, and {LIBRARY}.{module} cannot be imported ({type(error).__name__}: {error}). "
            f"The neuron images have the Neuron packages that fit together: make images VARIANT=neuron"
        ) from error
