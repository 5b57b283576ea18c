"""Describes the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """Return the processor, the number of CPUs, the load average of the last minute, and the version of Python."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(models, platform.processor() or platform.machine())
    load = os.getloadavg()[0]
    return f"{processor}, {os.cpu_count()} CPUs, load {load:.1f} at the start, Python {platform.python_version()}"
