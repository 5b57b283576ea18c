"""Installs a script as nvidia-smi for a test, so that the machine seems to have NVIDIA GPUs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.common.hardware.gpus import VISIBLE_VARIABLE

H200 = {
    "name": "NVIDIA H200",
    "compute_cap": "9.0",
    "driver_version": "580.95.05",
}
"""An H200 as nvidia-smi describes it."""
_PROGRAM = """#!{python}
import json, sys
(fields,) = (each.partition("=")[2].split(",") for each in sys.argv if each.startswith("--query-gpu="))
for gpu in json.loads({gpus!r}):
    print(", ".join(gpu[field] for field in fields))
"""


def install_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: Sequence[dict[str, str]]) -> None:
    """Let nvidia-smi list these GPUs in their order; CUDA shows all of them to this process."""
    install_nvidia_smi(monkeypatch, folder, _PROGRAM.format(python=sys.executable, gpus=json.dumps(list(gpus))))


def install_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Write `program`, a script with an interpreter line, as the nvidia-smi on PATH."""
    folder.mkdir()
    path = folder / "nvidia-smi"
    path.write_text(program, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
