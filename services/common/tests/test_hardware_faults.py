"""A fault of an accelerator is no bug: it is tried again, and the host and the device that failed are named."""

from __future__ import annotations

import pickle
import socket

import pytest

from services.common.errors import HardwareFault, RecipeError, WorkersLost
from services.common.hardware.faults import explain_hardware_fault, naming_hardware_faults
from services.common.launch.launcher import name_the_cause
from services.common.process.entry_point import exit_code_of

FAULTS = {
    "INTERNAL: nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE": "NRT_EXEC_HW_ERR_HBM_UE",
    "Bad StatusOr access: INTERNAL: NRT_EXEC_UNIT_UNRECOVERABLE status_code=101": "NRT_EXEC_UNIT_UNRECOVERABLE",
    "NRT_EXEC_HW_ERR_OF_A_LATER_RUNTIME": "NRT_EXEC_HW_ERR_OF_A_LATER_RUNTIME",
    **{
        f"nrt_execute_repeat: error status={number} on NeuronCore": name
        for number, name in (
            (1200, "NRT_EXEC_HW_ERR_COLLECTIVES"),
            (1201, "NRT_EXEC_HW_ERR_HBM_UE"),
            (1202, "NRT_EXEC_HW_ERR_NC_UE"),
            (1203, "NRT_EXEC_HW_ERR_DMA_ABORT"),
            (1204, "NRT_EXEC_SW_NQ_OVERFLOW"),
            (1205, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE"),
            (1206, "NRT_NETWORK_PROXY_FAILURE"),
        )
    },
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
    assert explain_hardware_fault(caught.value) is None


def test_a_fault_below_another_error_is_found_and_one_that_is_explained_stays() -> None:
    with pytest.raises(HardwareFault), naming_hardware_faults():
        raise ValueError("the step failed") from RuntimeError("NRT_EXEC_HW_ERR_DMA_ABORT")
    with pytest.raises(RecipeError), naming_hardware_faults():
        raise RecipeError("NRT_EXEC_HW_ERR_DMA_ABORT is no key")


def test_of_a_group_s_errors_the_fault_is_the_cause() -> None:
    fault = explain_hardware_fault(RuntimeError("NRT_EXEC_HW_ERR_NC_UE"))
    assert fault is not None
    received = pickle.loads(pickle.dumps(fault))
    errors = [WorkersLost("rank 1 waits for rank 0"), RecipeError("a consequence"), received]
    assert name_the_cause(errors, "rank 2 died") is received
