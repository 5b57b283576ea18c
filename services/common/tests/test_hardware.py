"""Accelerators of a machine: its GPUs and their published peaks, and faults, which name the host and the device."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.common.errors import DeviceError, HardwareFault, RecipeError
from services.common.hardware.faults import find_hardware_fault, naming_hardware_faults
from services.common.hardware.gpus import describe_kinds, sum_peaks
from services.common.process.entry_point import exit_code_of
from services.common.testing.gpus import H200, install_gpus, install_nvidia_smi

L4 = H200 | {"name": "NVIDIA L4", "compute_cap": "8.9"}


def test_a_machine_has_as_many_kinds_as_its_gpus_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200, L4, H200])

    assert describe_kinds() == ["NVIDIA H200, 9.0, 580.95.05", "NVIDIA L4, 8.9, 580.95.05"]


def test_a_driver_that_fails_or_is_absent_is_a_device_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_nvidia_smi(monkeypatch, tmp_path / "bin", "#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    with pytest.raises(DeviceError, match="NVIDIA-SMI has failed"):
        describe_kinds()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DeviceError):
        describe_kinds()


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


FAULTS = {
    "INTERNAL: nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE": "NRT_EXEC_HW_ERR_HBM_UE",
    "Bad StatusOr access: INTERNAL: NRT_EXEC_UNIT_UNRECOVERABLE status_code=101": "NRT_EXEC_UNIT_UNRECOVERABLE",
    "NRT_EXEC_HW_ERR_OF_A_LATER_RUNTIME": "NRT_EXEC_HW_ERR_OF_A_LATER_RUNTIME",
    "nrt_execute_repeat: error status=1203 on NeuronCore": "NRT_EXEC_HW_ERR_DMA_ABORT",
    "nerr code 1206": "NRT_NETWORK_PROXY_FAILURE",
}
NO_FAULTS = [
    "nrt_execute failed: NRT_EXEC_BAD_INPUT status=1002",
    "NRT_RESOURCE: not enough memory on the device (status_code=4)",
    "HTTP error code 1200 of a server",
    "shape '[1200, 1201]' is invalid for input of size 7",
]


@pytest.mark.parametrize(("said", "status"), FAULTS.items())
def test_a_fault_of_the_hardware_ends_with_75_and_names_host_and_device(
    said: str, status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "5")

    def work() -> int:
        with naming_hardware_faults():
            raise RuntimeError(said)

    assert exit_code_of(work) == 75
    told = capsys.readouterr().err
    assert status in told
    assert socket.gethostname() in told
    assert "NeuronCore 5" in told


@pytest.mark.parametrize("said", NO_FAULTS)
def test_what_the_program_did_wrong_stays_a_bug(said: str) -> None:
    with pytest.raises(RuntimeError, match=r".") as caught, naming_hardware_faults():
        raise RuntimeError(said)
    assert type(caught.value) is RuntimeError
    assert find_hardware_fault(caught.value) is None


def test_a_fault_below_another_error_is_found_and_one_that_is_explained_stays() -> None:
    with pytest.raises(HardwareFault), naming_hardware_faults():
        raise ValueError("the step failed") from RuntimeError("NRT_EXEC_HW_ERR_DMA_ABORT")
    with pytest.raises(RecipeError), naming_hardware_faults():
        raise RecipeError("NRT_EXEC_HW_ERR_DMA_ABORT is no key")
