"""What a compiled graph depends on. A cache is used only by a program with equal facts.

Inductor's own key leaves out the CPU's instruction set and the C++ compiler: a cache built for AVX-512 and
used with AVX2 is a "hit" that trains on NaN, and the reverse corrupts the heap (measured, torch 2.13). So the
directory is chosen by these facts, and they are stored beside it to say what differs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from services.common.errors import DeviceError
from services.common.recipe import Recipe, identity

CONTENT_VERSION = 1
"""Raised when the compiler stage would store other bytes for the same program."""

# The cache's place and the number of compile processes change where and how fast, not what.
_NEUTRAL_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"})
_GRAPH_VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "ATEN_CPU_CAPABILITY", "CXX", "MKL_", "DNNL_", "ONEDNN_")


def program_facts(recipe: Recipe) -> dict[str, Any]:
    """Everything that decides the graphs and the bits of this recipe's step on this machine, by name.

    Raises `DeviceError` when the recipe compiles and there is no C++ compiler.
    """
    return {
        "recipe": identity(recipe, "compile_cache"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cxx": _compiler_version() if recipe.compile.enabled else "none: nothing is compiled",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": _cpu_features(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_GRAPH_VARIABLES) and name not in _NEUTRAL_VARIABLES
        },
        "source": _source_digest(),
        "content_version": CONTENT_VERSION,
    }


def explain_difference(
    theirs: dict[str, Any], ours: dict[str, Any], sides: tuple[str, str] = ("cache", "this run")
) -> str:
    """The facts in which two programs differ, both sides, one per line."""
    lines = []
    for name in sorted({*theirs, *ours}):
        left, right = theirs.get(name), ours.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += [f"{name}.{line}" for line in explain_difference(left, right, sides).splitlines()]
        elif left != right:
            if isinstance(left, list) and isinstance(right, list):  # of dozens of CPU features: those that one lacks
                left, right = [each for each in left if each not in right], [each for each in right if each not in left]
            lines.append(f"{name}: {sides[0]} {_short(left)}, {sides[1]} {_short(right)}")
    return "\n".join(lines)


def _cpu_features() -> list[str]:
    if hasattr(torch.cpu, "get_capabilities"):
        return sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    # torch 2.9, the Neuron variant's, has one question per feature instead.
    questions = {name: getattr(torch._C._cpu, name) for name in dir(torch._C._cpu) if name.startswith("_is_")}
    return sorted(name for name, is_supported in questions.items() if is_supported())


def _compiler_version() -> str:
    """First line of `c++ --version` for the compiler that Inductor uses. Raises `DeviceError` without one."""
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


def _source_digest() -> str:
    """SHA-256 over the program's own files: a changed step is another program."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.py") if "tests" not in path.relative_to(folder).parts):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
