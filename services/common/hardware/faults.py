"""Faults of an accelerator, told from errors of the program that ran on it: another node, or the same one after its
repair, runs the same command.

The Neuron runtime names its status in the text of whatever its callers raise, by name (`NRT_EXEC_HW_ERR_HBM_UE`) or by
number; the numbers are those of its header nrt/nrt_status.h.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import HardwareFault, MillraceError

NEURON_FAULTS = {
    6: "NRT_HW_ERROR",
    101: "NRT_EXEC_UNIT_UNRECOVERABLE",
    1200: "NRT_EXEC_HW_ERR_COLLECTIVES",
    1201: "NRT_EXEC_HW_ERR_HBM_UE",
    1202: "NRT_EXEC_HW_ERR_NC_UE",
    1203: "NRT_EXEC_HW_ERR_DMA_ABORT",
    1204: "NRT_EXEC_SW_NQ_OVERFLOW",
    1205: "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
    1206: "NRT_NETWORK_PROXY_FAILURE",
}
"""The runtime's statuses that say nothing about the program, by their numbers."""
_CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
_BY_NAME = re.compile(r"\b(NRT_EXEC_HW_ERR_\w+|" + "|".join(NEURON_FAULTS.values()) + r")\b")
# A number says something of Neuron only where the text does: 6 and 101 are statuses of many libraries.
_BY_NUMBER = re.compile(r"\b(?:status|error|code|status[ _]code|error[ _]code)\s*[=:]?\s*\(?(12\d\d)\b", re.IGNORECASE)
_OF_NEURON = re.compile(r"nrt|neuron|\bnerr\b", re.IGNORECASE)


@contextmanager
def naming_hardware_faults() -> Iterator[None]:
    """Let an error that comes from a fault of this process's accelerator say so, with host and device."""
    try:
        yield
    except MillraceError:
        raise
    except Exception as error:
        fault = explain_hardware_fault(error)
        if fault is None:
            raise
        raise fault from error


def explain_hardware_fault(error: BaseException) -> HardwareFault | None:
    """The error to raise for an `error` in whose text the Neuron runtime tells a fault of its device; else None."""
    for each in _chain(error):
        if status := _find_status(str(each)):
            cores = os.environ.get(_CORES_VARIABLE)
            device = f"NeuronCore {cores}" if cores else "a Neuron device"
            first_line = str(each).strip().partition("\n")[0]
            return HardwareFault(
                f"{device} of host {socket.gethostname()} failed with {status}, a fault of the hardware and none of "
                f"the program: {first_line[:200]}. `neuron-ls` and the node's conditions (kubectl describe node) say "
                f"more; have the node replaced when it fails again. The same command continues from what was committed."
            )
    return None


def _find_status(text: str) -> str | None:
    if named := _BY_NAME.search(text):
        return named[1]
    numbered = _BY_NUMBER.search(text) if _OF_NEURON.search(text) else None
    return NEURON_FAULTS.get(int(numbered[1])) if numbered else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
