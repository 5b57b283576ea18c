"""Kernels are compiled once, and later processes load the machine code that was kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.tokenizer.encoding.chunk_encoder import load_kernels
from services.tokenizer.encoding.kernel_compiler import KernelCache
from services.tokenizer.tests.builders import (
    REPOSITORY,
    make_documents,
    publish,
    published,
    write_documents,
    write_recipe,
)

COUNT_COMPILATIONS = """
from services.tokenizer.encoding.chunk_encoder import load_kernels
from services.tokenizer.encoding.chunk_kernel import encode_documents, rehash
load_kernels("uint16")
print([sum(kernel.stats.cache_misses.values()) for kernel in (encode_documents, rehash)])
"""
IMPORTED_LIBRARIES = """
import sys
from services.tokenizer.command import main
code = main(sys.argv[1:])
print(sorted({"numba", "pandas"} & sys.modules.keys()), code)
"""


def run_python(program: str, *argv: str) -> str:
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_a_later_process_compiles_nothing() -> None:
    load_kernels("uint16")
    assert run_python(COUNT_COMPILATIONS) == "[0, 0]\n"


def make_cache(folder: Path) -> KernelCache:
    (folder / "kernel.py").touch()
    return KernelCache.from_function(load_kernels, str(folder / "kernel.py"))


def test_a_change_of_any_module_of_the_folder_makes_code_outdated(tmp_path: Path) -> None:
    stamp = make_cache(tmp_path).get_source_stamp()
    assert make_cache(tmp_path).get_source_stamp() == stamp
    (tmp_path / "called.py").write_text("LIMIT = 1", encoding="utf-8")
    assert make_cache(tmp_path).get_source_stamp() != stamp


def test_a_stage_with_the_reference_encoder_imports_neither_numba_nor_pandas(tmp_path: Path) -> None:
    """Pandas, which pyarrow imports where it can, takes a second of every process."""
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", make_documents(60)))
    argv = ["--recipe", str(recipe), "--root", str(tmp_path / "fsx"), "--launch", "inline"]
    assert run_python(IMPORTED_LIBRARIES, *argv, '--tokenizer.encoder="reference"').endswith("[] 0\n")
    by_kernel = publish(recipe, tmp_path / "kernel").manifest.content_digest
    assert published(tmp_path / "fsx").manifest.content_digest == by_kernel
