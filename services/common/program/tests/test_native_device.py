"""The native backend computes on the device that the recipe names, and each worker of a node has its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from services.common.errors import DeviceError
from services.common.program.backends.native_device import open_device
from services.common.program.backends.torch_native import TorchNative
from services.common.program.fingerprint import program_facts
from services.common.testing.recipes import make_recipe


@pytest.mark.parametrize(
    ("device", "named"),
    [("cuda", "CUDA_VISIBLE_DEVICES=not set"), ("neuron", "torch_neuronx"), ("xla", "torch_xla")],
)
def test_a_device_that_is_not_there_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, named: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for module in ("torch_neuronx", "torch_xla"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(DeviceError, match=f"parallel.device = '{device}'.*{named}") as raised:
        program_facts(make_recipe(tmp_path, parallel__device=device, train__reduction="fast"))
    assert raised.value.exit_code == 4


def test_kernels_for_a_gpu_are_kept_with_the_other_graphs(tmp_path: Path) -> None:
    """Triton has a cache of its own, which would be no part of what the compiler publishes."""
    for device in ("cpu", "cuda"):
        places = TorchNative.cache_environment(tmp_path, make_recipe(tmp_path, parallel__device=device))
        expected = {"TORCHINDUCTOR_CACHE_DIR"} | ({"TRITON_CACHE_DIR"} if device == "cuda" else set())
        assert places.keys() == expected
        assert all(Path(place).is_relative_to(tmp_path) for place in places.values())


@pytest.mark.parametrize(
    ("visible", "local_rank", "taken"),
    [
        (None, 1, "1"),
        ("4,5,6", 1, "5"),
        ("GPU-8f1c-2a,GPU-77e0-9b", 1, "GPU-77e0-9b"),
        ("6,7", 2, None),
        (None, 4, None),
    ],
)
def test_each_worker_of_a_node_sees_a_device_of_its_own_as_number_0(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, local_rank: int, taken: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    if taken is None:
        with pytest.raises(DeviceError, match=f"worker {local_rank} .*CUDA_VISIBLE_DEVICES={visible or 'not set'}"):
            open_device("cuda", local_rank)
        return

    assert open_device("cuda", local_rank) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken
