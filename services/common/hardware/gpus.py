"""NVIDIA GPUs: the kinds of this machine by the driver's tool nvidia-smi, and their published peaks.

torch would open a GPU to name them, also in processes that do not need one, and no fork of such a process can use
torch.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from services.common.errors import DeviceError
from services.common.hardware.instance_types import TERA

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT_SECONDS = 60.0
"""Seconds after which nvidia-smi is ended, because it waits for ever where the driver does not answer."""

# Dense bfloat16 with sums in float32, in TFLOP/s. NVIDIA's datasheets give the number with 2:4 sparsity, of which dense
# products reach half. The comments name the datasheet and its number.
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,  # A100 datasheet, which has both: 312, and 624 with sparsity
    "NVIDIA A100-SXM4-80GB": 312.0,  # the same
    "NVIDIA A100-PCIE-40GB": 312.0,  # the same
    "NVIDIA A100 80GB PCIe": 312.0,  # the same
    "NVIDIA H100 80GB HBM3": 989.0,  # H100 datasheet, SXM: 1,979
    "NVIDIA H100 PCIe": 756.0,  # H100 datasheet of 2023, PCIe: 1,513
    "NVIDIA H100 NVL": 835.0,  # H100 datasheet, NVL: 1,671
    "NVIDIA H200": 989.0,  # H200 datasheet, SXM: 1,979
    "NVIDIA H200 NVL": 835.0,  # H200 datasheet, NVL: 1,671
    "NVIDIA L4": 121.0,  # L4 datasheet: 242
    "NVIDIA L40S": 362.0,  # L40S datasheet, which has both: 362.05, and 733 with sparsity
    "NVIDIA GeForce RTX 4090": 165.2,  # Ada GPU architecture whitepaper, bfloat16 with sums in float32: 165.2 and 330.4
    "NVIDIA B200": 2250.0,  # HGX B200 datasheet: 36 PFLOP/s of eight
}
"""Peaks by the driver's name of the GPU, for MFU on a machine that is no EC2 instance."""


def describe_kinds() -> list[str]:
    """Return model, compute capability and driver of each kind of GPU. Raises `DeviceError` where nvidia-smi fails."""
    return sorted({", ".join(row) for row in _query("name", "compute_cap", "driver_version")})


def _query(*fields: str) -> list[list[str]]:
    """Return the values of these fields, a row for each GPU of the machine."""
    if shutil.which("nvidia-smi") is None:
        raise DeviceError(
            "nvidia-smi is not on PATH. It comes with the driver; a container gets it by "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        )
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS)
    except subprocess.SubprocessError as error:  # nvidia-smi prints most errors on stdout
        printed = str(getattr(error, "stderr", "") or getattr(error, "stdout", "") or "").strip()[:300]
        raise DeviceError(f"{error} {printed}") from error
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def sum_peaks(names: Sequence[str]) -> float | None:
    """Return the dense bfloat16 FLOP/s of all these GPUs together; None without GPUs, or where a peak is unknown."""
    if not names or not PEAK_TFLOPS.keys() >= set(names):
        return None
    return sum(PEAK_TFLOPS[name] for name in names) * TERA
