"""Compiles the kernels that an image contains: `python -m services.tokenizer.encoding.shipped_kernels DIR`."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import numpy as np

from services.tokenizer.encoding.chunk_encoder import examples_of_arguments
from services.tokenizer.encoding.kernel_store import common_processor, is_common_processor, read_or_compile


def compile_into(folder: Path) -> None:
    """Compile all kernels for `common_processor` into `folder`. On a machine that cannot run them, do nothing."""
    if not is_common_processor():
        print(f"no kernels were compiled: they do not run on {platform.machine()}, where numba compiles on first use")
        return
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= common_processor()  # before numba is imported, which reads the variables then
    for dtype in (np.uint16, np.uint32):
        for name, arguments in examples_of_arguments(np.dtype(dtype)).items():
            read_or_compile(folder, name, arguments)
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m services.tokenizer.encoding.shipped_kernels")
    parser.add_argument("folder", type=Path, help="folder for the compiled kernels")
    compile_into(parser.parse_args().folder)
