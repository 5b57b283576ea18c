"""The facts of this machine that decide Inductor's graphs and their bits.

Inductor's own cache key leaves out the CPU's instruction set and the C++ compiler: a cache built for AVX-512 and used
with AVX2 is a "hit" that trains on NaN, and the reverse corrupts the heap (measured, torch 2.13).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import Any

import torch

from services.common.errors import DeviceError
from services.common.program.backends.environment_facts import variables_of

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_CACHE_VARIABLE = "TRITON_CACHE_DIR"
"""Variable that names the folder of Triton's kernels. Where it is unset, Inductor puts them below its own folder."""
# These change where graphs are kept and how fast they are compiled, and no graph.
_NEUTRAL_VARIABLES = frozenset({CACHE_VARIABLE, TRITON_CACHE_VARIABLE, "TORCHINDUCTOR_COMPILE_THREADS"})
_GRAPH_VARIABLES = (
    *("TORCH_COMPILE_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "ATEN_CPU_CAPABILITY"),
    *("CXX", "MKL_", "DNNL_", "ONEDNN_"),
)


def inductor_facts(is_compiled: bool) -> dict[str, Any]:
    """Return the facts by name. Raises `DeviceError` where the recipe `is_compiled` and there is no C++ compiler."""
    return {
        "cxx": _compiler_version() if is_compiled else "none: nothing is compiled",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": _cpu_features(),
        "environment": variables_of(os.environ, _GRAPH_VARIABLES, without=_NEUTRAL_VARIABLES),
    }


def _cpu_features() -> list[str]:
    if hasattr(torch.cpu, "get_capabilities"):
        return sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    # torch 2.9, which the Neuron variant has, offers one function per CPU feature instead.
    questions = {name: getattr(torch._C._cpu, name) for name in dir(torch._C._cpu) if name.startswith("_is_")}
    return sorted(name for name, is_supported in questions.items() if is_supported())


def _compiler_version() -> str:
    """Return the first line of `c++ --version` of the compiler that Inductor uses. Raises `DeviceError` without one."""
    command = shlex.split(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    compiler = command[0]
    if shutil.which(compiler) is None:
        raise DeviceError(
            f"no C++ compiler: {compiler!r} is not on PATH, and Inductor compiles the train step with it. "
            f"Install it (Debian: apt-get install g++; macOS: xcode-select --install), set CXX, or run without "
            f"compiled graphs: --compile.enabled=false"
        )
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise DeviceError(f"{compiler} --version failed with {shown.returncode}: {shown.stderr.strip()[:300]}")
    return shown.stdout.splitlines()[0]
