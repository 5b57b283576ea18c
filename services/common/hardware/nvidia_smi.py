"""Lists the NVIDIA GPUs of this machine through the driver's tool nvidia-smi.

torch would open a GPU to list them, also in processes that do not need one, and no fork of such a process can use
torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace

from services.common.errors import DeviceError
from services.common.hardware.instance_types import MIB

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
SLICE_PREFIX = "MIG-"
TIMEOUT_SECONDS = 60.0
"""Seconds after which nvidia-smi is ended, because it waits for ever where the driver does not answer."""


@dataclass(frozen=True)
class Gpu:
    index: int
    """Number of the GPU in the order of the PCI bus."""
    uuid: str
    name: str
    """Name of the GPU's model, as torch.cuda.get_device_name returns it."""
    driver: str
    memory_bytes: int | None
    """Size of the GPU's memory; None where the driver does not know it, as for a GPU that shares its host's memory."""
    used_bytes: int | None
    """Memory of the GPU that processes of all users hold; None where the driver does not know it."""


def list_gpus() -> list[Gpu]:
    """Return all GPUs of the machine. Raises `DeviceError` where nvidia-smi fails."""
    rows = _query("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
    return [
        Gpu(int(index), uuid, name, driver, _read_mib(memory), _read_mib(used))
        for index, uuid, name, driver, memory, used in rows
    ]


def list_visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows to this process: those in CUDA_VISIBLE_DEVICES, or all of the machine.

    Like CUDA, it ends the list at the first name that is no GPU. Numbers count in the order of the PCI bus; CUDA begins
    with the fastest GPU, which differs only on machines with several models. A slice of a GPU (MIG) has no memory size
    here, and its GPU is unknown. Raises `DeviceError` where nvidia-smi fails.
    """
    gpus = list_gpus()
    if VISIBLE_VARIABLE not in os.environ:
        return gpus
    visible: list[Gpu] = []
    for name in map(str.strip, os.environ[VISIBLE_VARIABLE].split(",")):
        if name.startswith(SLICE_PREFIX):
            found = [replace(gpu, name=f"slice of {gpu.name}", memory_bytes=None, used_bytes=None) for gpu in gpus]
        else:
            found = [gpu for gpu in gpus if name == str(gpu.index) or (name and gpu.uuid.startswith(name))]
        if not found:
            break
        visible.append(found[0])
    return visible


def describe_kinds() -> list[str]:
    """Return a text with model, compute capability and driver for each model of GPU in this machine.

    Raises `DeviceError` where nvidia-smi fails.
    """
    return sorted({", ".join(row) for row in _query("name", "compute_cap", "driver_version")})


def _query(*fields: str) -> list[list[str]]:
    """Return the values of these fields, a row for each GPU of the machine."""
    if shutil.which("nvidia-smi") is None:
        raise DeviceError(
            "nvidia-smi is not on PATH, and the program needs it to know the GPU. It comes with the driver; a "
            "container gets the driver's tools by NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        )
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"{' '.join(command)} did not answer in {TIMEOUT_SECONDS:.0f} s: the driver hangs. Run it by hand; if it "
            f"hangs again, restart the machine."
        ) from error
    if shown.returncode != 0:
        told = (shown.stderr.strip() or shown.stdout.strip())[:300]  # it prints most errors on stdout
        raise DeviceError(f"{' '.join(command)} failed with {shown.returncode}: {told}")
    rows = [[value.strip() for value in line.split(",")] for line in shown.stdout.splitlines() if line.strip()]
    if unread := [row for row in rows if len(row) != len(fields)]:
        raise DeviceError(f"{' '.join(command)} printed {unread[0]}, expected {len(fields)} values for a GPU")
    return rows


def _read_mib(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None
