"""The parts of neuronx-distributed (NxD) 0.18 that the program uses: its NKI attention kernel, and its groups of ranks.

NxD's layers are not used, because with them each rank of a model traces another graph. NxD is imported on first use.
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
"""Variable with the number of physical cores of one logical core, which one worker uses. On trn1 it is 1."""
SEQUENCE_MULTIPLE = 2048
MAX_HEAD_DIM = 128


def is_installed() -> bool:
    """Return whether NxD is installed, without importing it."""
    return importlib.util.find_spec(LIBRARY) is not None


def logical_core_size() -> int:
    """Return the number of physical cores of a worker's logical core."""
    return int(os.environ.get(LOGICAL_CORE_SIZE, "1"))


class FlashAttention:
    """Causal attention by the kernel of `neuronx_distributed.kernels.flash_attn`, which stores no [S, S] scores."""

    def __init__(self, kernel: Callable[..., Tensor], hardware: object, core_size: int = 1) -> None:
        """Wrap NxD's `nki_flash_attn_func` for a platform, which is a member of NxD's enumeration `hardware`."""
        self._kernel, self._hardware, self._core_size = kernel, hardware, core_size

    @classmethod
    def load(cls) -> Self:
        """Import the kernel. Raises `DeviceError` where NxD is installed and cannot be imported."""
        core_size, hardware = logical_core_size(), _import("utils.utils").hardware
        # The platform follows from the core size, because a node that only traces graphs is on another platform.
        platform = hardware.TRN1 if core_size == 1 else hardware.TRN2
        return cls(_import("kernels.flash_attn").nki_flash_attn_func, platform, core_size)

    def __call__(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor) -> Tensor:
        """Return attention [B, H, S, N] of tensors for which `why_not_flash` returns an empty text."""
        # NxD starts the kernel once for each query head, with the key-value head of the same number: where there are
        # fewer key-value heads, it would read beyond them.
        copies = q_BHSN.shape[1] // k_BKSN.shape[1]
        mixed_BHSN: Tensor = self._kernel(
            q_BHSN,
            _repeat_heads(k_BKSN, copies),
            _repeat_heads(v_BKSN, copies),
            lnc=self._core_size,
            softmax_scale=q_BHSN.shape[-1] ** -0.5,
            causal=True,
            mixed_precision=True,  # float32 for sums and for everything but products
            hardware_type=self._hardware,
            transpose_nki_inputs=False,  # False for [B, H, S, N], True for [B, H, N, S]
        )
        return mixed_BHSN


def why_not_flash(q_BHSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> str:
    """Return why the kernel does not take tensors of these shapes and types; empty where it does."""
    _, num_heads, length, head_dim = q_BHSN.shape
    if mask_B1SS is not None:
        return "tokens attend within their documents, and the kernel takes no mask"
    if length % SEQUENCE_MULTIPLE:
        return f"a sequence has {length:,} positions, and the kernel takes multiples of {SEQUENCE_MULTIPLE:,}"
    if head_dim > MAX_HEAD_DIM:
        return f"a head has {head_dim} dimensions, and the kernel takes at most {MAX_HEAD_DIM}"
    if v_BKSN.dtype != torch.bfloat16:
        return f"the kernel multiplies in bfloat16, and train.dtype is {str(v_BKSN.dtype).removeprefix('torch.')}"
    if num_heads % logical_core_size():
        return f"a worker has {num_heads} heads, and its {logical_core_size()} physical cores cannot share them evenly"
    return ""


def require_groups(mesh: Mesh) -> None:
    """Raise `DeviceError` unless the mesh's groups of ranks are those that NxD chooses for this kind of node.

    NxD chooses groups by the links between cores: on trn1 a group of 4 has no neighbouring cores, and on trn2 the
    halves of some groups lie in other rows of chips. This asks NxD for lists of ranks, and opens no device or group.
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
    """Raise `DeviceError` where the mesh's groups along an axis are not `theirs`, and show both."""
    for axis, their_groups in theirs.items():
        ours = mesh.groups(axis)
        if sorted(map(list, their_groups)) != sorted(ours):
            raise DeviceError(
                f"parallel.tensor_parallel_size = {mesh.tensor_parallel_size} on {mesh.world_size} workers of "
                f"{platform}: the groups of the {axis} axis are {_show(ours)} here, and neuronx-distributed chooses "
                f"{_show(their_groups)}, by the links between cores. Choose another size, 8 or 32 on trn1: "
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
    except Exception as error:  # five Neuron packages may not fit together; there is no fallback
        raise DeviceError(
            f"{LIBRARY} is installed, and {LIBRARY}.{module} cannot be imported ({type(error).__name__}: {error}). "
            f"The neuron images have the Neuron packages that fit together: make images VARIANT=neuron"
        ) from error
