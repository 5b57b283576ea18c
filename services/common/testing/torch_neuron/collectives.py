"""The stand-in's process groups: the backend `neuron` of torch.distributed, over gloo.

They are as strict as TorchNeuron's: the first group is that of all workers, tensors are the device's, and there is no
`all_to_all_single` with slices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.testing.torch_neuron.device import NAME, UnsupportedOnNeuron, on_cpu

_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NEURON_RT_ROOT_COMM_ID")
"""Variables that the runtime of a group reads."""


def register() -> None:
    """Make torch.distributed know the backend."""
    dist.Backend.register_backend(NAME, _form_group, devices=[NAME])


class NeuronProcessGroup(dist.ProcessGroup):
    """A group whose collectives take tensors of the device."""

    num_formed = 0
    """Number of groups that this process has formed."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._run(self._gloo.allreduce, tensors, options=options)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Any:
        return self._run(self._gloo.allgather_into_tensor_coalesced, outputs, inputs, options=options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Any:
        return self._run(self._gloo.reduce_scatter_tensor_coalesced, outputs, inputs, options=options)

    def alltoall_base(self, *arguments: Any) -> Any:
        raise UnsupportedOnNeuron("all_to_all_single with slices, which TorchNeuron does not have")

    def _run(self, collective: Callable[..., Any], *tensors: Sequence[Tensor], options: Any) -> Any:
        for each in tensors:
            for x in each:
                if x.device.type != NAME:
                    raise UnsupportedOnNeuron(f"a collective of the device got a tensor {list(x.shape)} of {x.device}")
        return collective(*([on_cpu(x) for x in each] for each in tensors), options)


def _form_group(store: Any, rank: int, size: int, timeout: timedelta) -> NeuronProcessGroup:
    missing = [name for name in _REQUIRED_VARIABLES if name not in os.environ]
    if missing:
        raise UnsupportedOnNeuron(f"the runtime of a group lacks {', '.join(missing)}")
    if NeuronProcessGroup.num_formed == 0 and size != int(os.environ["WORLD_SIZE"]):
        raise UnsupportedOnNeuron(
            f"the first group has {size} of {os.environ['WORLD_SIZE']} workers: the runtime would take its rank and "
            f"size for those of all workers"
        )
    NeuronProcessGroup.num_formed += 1
    return NeuronProcessGroup(store, rank, size, timeout)
