"""Prints the time of a step by kind of operation."""

from __future__ import annotations

from collections import defaultdict

from torch.profiler import ProfilerActivity, profile

from benchmarks.trainer.measurement import STEPS
from benchmarks.trainer.workbench import STEPS_LEFT_OUT, Workbench

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("scaled_dot_product",),
    "optimizer and clip": ("_fused_adamw", "linalg_vector_norm", "sqrt_sub_unbind", "foreach", "aten::sqrt"),
    "cross-entropy": ("log_softmax", "nll_loss"),
    "casts and copies": ("aten::copy_", "aten::cat", "aten::fill_", "_to_copy"),
}
"""Parts of operations' names by kind; the first match counts. Inductor's kernels are named after their operations."""
OTHER, FUSED = "other operations, Python", "graph_"


def print_profile(row: str, bench: Workbench) -> None:
    """Print the mean milliseconds of the measured steps by kind of operation."""
    if "compiled" in row:
        import torch._inductor.config  # noqa: PLC0415 - 3 s that eager rows save

        torch._inductor.config.cpp.enable_kernel_profile = True
    step = STEPS[row](bench)
    for number in range(STEPS_LEFT_OUT):
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for number in range(bench.steps):
            step(STEPS_LEFT_OUT + number)
    kinds: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        kinds[_kind_of(event.key)] += event.self_cpu_time_total / 1e3 / bench.steps
    total = sum(kinds.values())
    print(f"{row}: {total:.0f} ms per step, which includes the profiler's overhead")
    for kind, milliseconds in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"  {kind:<28}{milliseconds:>8.1f} ms{milliseconds / total:>8.1%}")


def _kind_of(name: str) -> str:
    found = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(found, "other fused kernels" if name.startswith(FUSED) else OTHER)
