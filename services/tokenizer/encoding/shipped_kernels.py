"""Compiles the kernels that an image contains: `python -m services.tokenizer.encoding.shipped_kernels DIR`."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import numpy as np

from services.tokenizer.encoding.compiled_kernels import common_processor, is_common_processor


def compile_into(folder: Path) -> None:
    """Compile all kernels for `common_processor` into `folder`. On a machine that cannot run them, do nothing."""
    if not is_common_processor():
        print(f"no kernels were compiled: they do not run on {platform.machine()}, where numba compiles on first use")
        return
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"NUMBA_CACHE_DIR": str(folder), **common_processor()}
    from services.tokenizer.encoding.chunk_encoder import compile_kernels  # noqa: PLC0415 - numba reads the variables when it is imported

    for dtype in (np.uint16, np.uint32):
        compile_kernels(np.dtype(dtype))
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m services.tokenizer.encoding.shipped_kernels")
    parser.add_argument("folder", type=Path, help="folder for the compiled kernels")
    compile_into(parser.parse_args().folder)
