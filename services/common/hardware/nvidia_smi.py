"""What NVIDIA's driver says of the GPUs of this machine, asked of its own tool, nvidia-smi.

torch would open a GPU to say as much, in processes too that have no use for one, and no fork of such a process can use
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
"""Seconds after which nvidia-smi is given up, which waits for ever where the driver does not answer."""


@dataclass(frozen=True)
class Gpu:
    index: int
    """Number of the GPU in the order of the PCI bus."""
    uuid: str
    name: str
    """Name of the GPU's kind, which torch.cuda.get_device_name gives, too."""
    driver: str
    memory_bytes: int | None
    """All memory of the GPU; None where the driver does not tell, as of a GPU that shares the memory of its host."""
    used_bytes: int | None
    """Memory of the GPU that processes hold, those of other users included; None where the driver does not tell."""


def list_gpus() -> list[Gpu]:
    """The GPUs of the machine, whatever of them this process may use.

    Raises `DeviceError` where nvidia-smi cannot say.
    """
    rows = _query("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
    return [
        Gpu(int(index), uuid, name, driver, _read_mib(memory), _read_mib(used))
        for index, uuid, name, driver, memory, used in rows
    ]


def list_visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA shows to this process: all of the machine, or those that CUDA_VISIBLE_DEVICES names.

    As CUDA does, it ends the list at the first name that is no GPU. Numbers count in the order of the PCI bus; CUDA's
    own order begins with the fastest GPU, which is another one on a machine with several kinds alone. Of a slice of a
    GPU (MIG) neither the memory nor which GPU it is of is told here. Raises `DeviceError` where nvidia-smi cannot say.
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
    """The kinds of GPU of this machine, each as name, compute capability and driver.

    Raises `DeviceError` where nvidia-smi cannot say.
    """
    return sorted({", ".join(row) for row in _query("name", "compute_cap", "driver_version")})


def _query(*fields: str) -> list[list[str]]:
    """The values of these fields, a row for each GPU of the machine."""
    if shutil.which("nvidia-smi") is None:
        raise DeviceError(
            "nvidia-smi is not on PATH, which says what kind of GPU a graph is compiled for. It comes with the driver; "
            "in a container, give it the driver's tools (NVIDIA_DRIVER_CAPABILITIES=compute,utility)."
        )
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"{' '.join(command)} did not answer in {TIMEOUT_SECONDS:.0f} s: the driver hangs. Run it by hand; a "
            f"driver that does not answer needs the machine to be started anew."
        ) from error
    if shown.returncode != 0:
        told = (shown.stderr.strip() or shown.stdout.strip())[:300]  # it says most of what is wrong on stdout
        raise DeviceError(f"{' '.join(command)} failed with {shown.returncode}: {told}")
    rows = [[value.strip() for value in line.split(",")] for line in shown.stdout.splitlines() if line.strip()]
    if unread := [row for row in rows if len(row) != len(fields)]:
        raise DeviceError(f"{' '.join(command)} was asked for {len(fields)} values a GPU and said {unread[0]}")
    return rows


def _read_mib(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None
