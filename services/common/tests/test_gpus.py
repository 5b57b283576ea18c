"""GPUs of a machine: what the driver's tool says of them, and the peaks that are published of their kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import DeviceError
from services.common.hardware.gpus import (
    VISIBLE_VARIABLE,
    describe_kinds,
    list_gpus,
    list_visible_gpus,
    sum_peaks,
)
from services.common.testing.gpus import H200, install_gpus, install_nvidia_smi

L4 = H200 | {"name": "NVIDIA L4", "compute_cap": "8.9", "memory.total": "23034"}


def test_a_machine_has_as_many_kinds_as_its_gpus_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200, L4, H200])

    assert describe_kinds() == ["NVIDIA H200, 9.0, 580.95.05", "NVIDIA L4, 8.9, 580.95.05"]
    assert [gpu.memory_bytes for gpu in list_gpus()] == [size * 2**20 for size in (143771, 23034, 143771)]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-1", [1]),
        ("", []),
        ("1,7,2", [1]),  # as CUDA: nothing behind a number that is no GPU's
    ],
)
def test_cuda_shows_the_gpus_that_the_environment_names(
    visible: str | None, indices: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200, L4, H200])
    if visible is not None:
        monkeypatch.setenv(VISIBLE_VARIABLE, visible)

    assert [gpu.index for gpu in list_visible_gpus()] == indices


def test_a_slice_of_a_gpu_has_neither_its_memory_nor_its_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200])
    monkeypatch.setenv(VISIBLE_VARIABLE, "MIG-5c1f")

    (found,) = list_visible_gpus()
    assert found.memory_bytes is None
    assert sum_peaks([found.name]) is None


def test_a_driver_that_fails_or_is_absent_is_a_device_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_nvidia_smi(monkeypatch, tmp_path / "bin", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    with pytest.raises(DeviceError, match="NVIDIA-SMI has failed"):
        list_gpus()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DeviceError):
        list_gpus()


@pytest.mark.parametrize(
    ("names", "peak"),
    [
        (["NVIDIA H100 PCIe"], 756e12),
        (["NVIDIA H200", "NVIDIA H200"], 2 * 989e12),
        (["NVIDIA H200 MIG 1g.18gb"], None),
        (["NVIDIA H200", "NVIDIA H300"], None),
        ([], None),
    ],
)
def test_peaks_add_up_where_all_names_are_known(names: list[str], peak: float | None) -> None:
    assert sum_peaks(names) == peak
