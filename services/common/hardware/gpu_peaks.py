"""The published peaks of NVIDIA's GPUs, by the name that the driver gives them.

They are what MFU is held against on a machine that is no EC2 instance. A name that is not in the table has no peak:
names that look alike hide peaks that do not (an H100 of PCIe has three quarters of what one of SXM has).
"""

from __future__ import annotations

from collections.abc import Iterable

from services.common.hardware.instance_types import TERA

# Dense bfloat16 with sums in float32, in TFLOP/s. NVIDIA's datasheets tell the number with 2:4 sparsity, of which dense
# products reach half; that number and the document stand behind each.
PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,  # A100 datasheet, which tells both: 312, and 624 with sparsity
    "NVIDIA A100-SXM4-80GB": 312.0,  # the same
    "NVIDIA A100-PCIE-40GB": 312.0,  # the same
    "NVIDIA A100 80GB PCIe": 312.0,  # the same
    "NVIDIA H100 80GB HBM3": 989.0,  # H100 datasheet, SXM: 1,979
    "NVIDIA H100 PCIe": 756.0,  # H100 datasheet of 2023, PCIe: 1,513
    "NVIDIA H100 NVL": 835.0,  # H100 datasheet, NVL: 1,671
    "NVIDIA H200": 989.0,  # H200 datasheet, SXM: 1,979
    "NVIDIA H200 NVL": 835.0,  # H200 datasheet, NVL: 1,671
    "NVIDIA L4": 121.0,  # L4 datasheet: 242
    "NVIDIA L40S": 362.0,  # L40S datasheet, which tells both: 362.05, and 733 with sparsity
    "NVIDIA GeForce RTX 4090": 165.2,  # Ada GPU architecture whitepaper, bfloat16 with sums in float32: 165.2 and 330.4
    "NVIDIA B200": 2250.0,  # HGX B200 datasheet: 36 PFLOP/s of eight
}


def find_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by the driver's name for it; None where no peak is known here."""
    tflops = PEAK_TFLOPS.get(name)
    return tflops * TERA if tflops else None


def sum_peaks(names: Iterable[str]) -> float | None:
    """Dense bfloat16 FLOP/s of all these GPUs together; None where there are none, or one has no known peak."""
    peaks = [find_peak(name) for name in names]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None
