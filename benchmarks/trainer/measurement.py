"""Measures one row in one round, in a process of its own: seconds of the steps, and the machine's peak FLOP/s."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from benchmarks.trainer import speed_rows
from benchmarks.trainer.hugging_face_trainer import run_trainer
from benchmarks.trainer.loop_row import run_loop
from benchmarks.trainer.workbench import STEPS_LEFT_OUT, Workbench
from services.trainer.inspection.gemm_peak import measure_gemm_peak

STEPS = {
    row.__name__: row
    for row in (
        speed_rows.ours_eager,
        speed_rows.ours_compiled,
        speed_rows.hugging_face_eager,
        speed_rows.hugging_face_compiled,
        speed_rows.litgpt_eager,
        speed_rows.litgpt_compiled,
    )
}
LOOP, TRAINER = "ours_loop", "hugging_face_trainer"
ROWS = (*STEPS, TRAINER, LOOP)
PEERS = (TRAINER, "litgpt_eager", "litgpt_compiled")
"""Rows whose libraries the tests' environment lacks."""


@dataclass
class Measurement:
    seconds: list[float] = field(default_factory=list)
    """Seconds of every measured step."""
    losses: list[float] = field(default_factory=list)
    """Losses of all steps; empty for our own loop, which trains on another corpus."""
    data_seconds: list[float] = field(default_factory=list)
    """Seconds of every measured step in which our loop waited for tokens."""
    first_step_seconds: float = 0.0
    """Seconds from an empty process to the end of its first step."""
    peaks: list[float] = field(default_factory=list)
    """FLOP/s of a product of large matrices, before and after the steps."""
    peak_memory_bytes: int = 0
    """Of the process, or of its tensors on a GPU."""
    device_name: str = ""
    """The driver's name of the GPU; empty on a CPU."""
    loads: list[float] = field(default_factory=list)
    """Load average of one minute, before and after the steps."""
    libraries: dict[str, str] = field(default_factory=dict)


def measure(row: str, bench: Workbench) -> Measurement:
    began = time.perf_counter()
    found = Measurement(loads=[os.getloadavg()[0]])
    device = bench.device
    found.peaks.append(measure_gemm_peak("bfloat16", bench.threads, device=device))
    peak_seconds = time.perf_counter() - began
    if row == TRAINER:
        seconds, found.losses = run_trainer(bench)
    elif row == LOOP:
        seconds, found.data_seconds = run_loop(bench)
    else:
        step, seconds = STEPS[row](bench), []
        for number in range(bench.num_steps):
            started = time.perf_counter()
            found.losses.append(step(number))
            seconds.append(time.perf_counter() - started)
            if not number:
                found.first_step_seconds = time.perf_counter() - began - peak_seconds
    found.seconds, found.data_seconds = seconds[STEPS_LEFT_OUT:], found.data_seconds[STEPS_LEFT_OUT:]
    if device == "cuda":
        found.device_name = torch.cuda.get_device_name()
        found.peak_memory_bytes = torch.cuda.max_memory_allocated()
    else:
        found.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found.peaks.append(measure_gemm_peak("bfloat16", bench.threads, device=device))
    found.loads.append(os.getloadavg()[0])
    names = ["torch", *(["litgpt"] if "litgpt" in row else ["transformers"] if "hugging" in row else [])]
    found.libraries = {name: version(name) for name in names}
    return found
