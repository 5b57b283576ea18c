"""Tells faults of an accelerator from errors of the program: after a fault, another node runs the same command.

The Neuron runtime puts its status into the text of its callers' errors, by name (`NRT_EXEC_HW_ERR_HBM_UE`) or by the
number in its header nrt/nrt_status.h.
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
"""The runtime's statuses for faults that are not the program's, by number."""
_BY_NAME = re.compile(r"\b(NRT_EXEC_HW_ERR_\w+|" + "|".join(NEURON_FAULTS.values()) + r")\b")
# A number counts only in a text about Neuron: 6 and 101 are statuses of many libraries.
_BY_NUMBER = re.compile(r"\b(?:status|error|code|status[ _]code|error[ _]code)\s*[=:]?\s*\(?(12\d\d)\b", re.IGNORECASE)
_OF_NEURON = re.compile(r"nrt|neuron|\bnerr\b", re.IGNORECASE)


@contextmanager
def naming_hardware_faults() -> Iterator[None]:
    """Raise `HardwareFault`, which names host and device, in place of an error that comes from a fault of a device."""
    try:
        yield
    except MillraceError:
        raise
    except Exception as error:
        fault = find_hardware_fault(error)
        if fault is None:
            raise
        raise fault from error


def find_hardware_fault(error: BaseException | None) -> HardwareFault | None:
    """Return the error to raise where the Neuron runtime reports a fault of its device in `error` or in its cause."""
    while error is not None:
        if status := _find_status(str(error)):
            cores = os.environ.get("NEURON_RT_VISIBLE_CORES")
            device = f"NeuronCore {cores}" if cores else "a Neuron device"
            first_line = str(error).strip().partition("\n")[0]
            return HardwareFault(
                f"{device} of host {socket.gethostname()} failed with {status}: {first_line[:200]}. `neuron-ls` and "
                f"kubectl describe node show more; replace the node if it fails again. The same command continues."
            )
        error = error.__cause__ or error.__context__
    return None


def _find_status(text: str) -> str | None:
    if named := _BY_NAME.search(text):
        return named[1]
    numbered = _BY_NUMBER.search(text) if _OF_NEURON.search(text) else None
    return NEURON_FAULTS.get(int(numbered[1])) if numbered else None
