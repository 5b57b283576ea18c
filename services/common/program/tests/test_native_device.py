"""The native backend computes on the device that the recipe names, and each worker of a node has its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.common.errors import DeviceError
from services.common.program.backends import torch_native
from services.common.program.backends.native_device import open_device
from services.common.program.backends.torch_native import TorchNative
from services.common.program.fingerprint import program_facts
from services.common.program.mesh import Mesh
from services.common.program.micro_batch import make_synthetic_micro_batch
from services.common.program.step import Program
from services.common.recipe.schema import Device
from services.common.testing.recipes import make_recipe

EAGER = {"compile__enabled": "false", "train__attention_mask": "block_causal", "train__z_loss": "1e-4"}
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class HostApart(TorchDispatchMode):
    """Fails where an operation reads tensors of the host and of the device, unless it moves one."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Iterable[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        devices = {leaf.device for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)}
        assert operation in MOVES or len(devices) <= 1, operation
        return operation(*arguments, **options or {})


def test_what_a_step_computes_with_is_on_the_worker_s_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has shapes and no values: any machine has one."""
    monkeypatch.setattr(torch_native, "open_device", lambda name, local_rank: torch.device("meta"))
    monkeypatch.setattr(TorchNative, "autocast", lambda backend, dtype: nullcontext())  # torch has no autocast for it
    monkeypatch.setattr(TorchNative, "has_fused_adamw", lambda backend, is_compiled: False)  # nor such a kernel
    monkeypatch.setattr(TorchNative, "to_host", lambda backend, x: x)  # there are no values to copy
    recipe = make_recipe(tmp_path, **EAGER)
    program = Program(recipe, TorchNative(Mesh(0, data_parallel_size=1), 1, "exact"))
    micro_batches = [make_synthetic_micro_batch(recipe) for _ in range(recipe.batch.num_micro_batches)]

    with HostApart():  # type: ignore[no-untyped-call]
        result = program.train_step(0, micro_batches)
        evaluated = program.evaluate(micro_batches[0])
        is_finite = program.state.is_finite()

    found = [*result, evaluated, is_finite, *program.state.read().values(), *program.model.buffers()]
    assert all(tensor.is_meta for tensor in found)
    assert not any(tensor.is_meta for micro_batch in micro_batches for tensor in micro_batch if tensor is not None)


@pytest.mark.parametrize(
    ("device", "named"),
    [("cuda", "CUDA_VISIBLE_DEVICES=not set"), ("neuron", "torch_neuronx")],
)
def test_a_device_that_is_not_there_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, named: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)

    with pytest.raises(DeviceError, match=f"parallel.device = '{device}'.*{named}") as raised:
        program_facts(make_recipe(tmp_path, parallel__device=device))
    assert raised.value.exit_code == 4


def test_kernels_for_a_gpu_are_kept_with_the_other_graphs(tmp_path: Path) -> None:
    """Triton has a cache of its own, which would be no part of what the compiler publishes."""
    for device in ("cpu", "cuda"):
        places = TorchNative.cache_environment(tmp_path, make_recipe(tmp_path, parallel__device=device))
        expected = {"TORCHINDUCTOR_CACHE_DIR"} | ({"TRITON_CACHE_DIR"} if device == "cuda" else set())
        assert places.keys() == expected
        assert all(Path(place).is_relative_to(tmp_path) for place in places.values())


@pytest.mark.parametrize(
    ("visible", "taken"), [(None, "1"), ("4,5,6", "5"), ("GPU-8f1c-2a,GPU-77e0-9b", "GPU-77e0-9b")]
)
def test_each_worker_of_a_node_sees_a_device_of_its_own_as_number_0(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, taken: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]

    assert open_device("cuda", local_rank=1) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


def test_more_workers_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")

    with pytest.raises(DeviceError, match=r"worker 2 .*CUDA_VISIBLE_DEVICES=6,7\)"):
        open_device("cuda", local_rank=2)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")
def test_losses_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, **EAGER)

    def losses(device: Device) -> list[float]:
        backend = TorchNative(Mesh(0, data_parallel_size=1), 1, "exact", device)
        program, micro_batch = Program(recipe, backend), make_synthetic_micro_batch(recipe)
        micro_batches = [micro_batch] * recipe.batch.num_micro_batches
        return [backend.read(program.train_step(step, micro_batches)._asdict())["loss"] for step in range(5)]

    assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-5)
