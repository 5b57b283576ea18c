"""Kernels are compiled once for a processor, and later processes link the code that was kept."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.tokenizer.encoding import kernel_store
from services.tokenizer.encoding.chunk_encoder import examples_of_arguments, load_kernels
from services.tokenizer.encoding.kernel_store import common_processor, read_or_compile
from services.tokenizer.encoding.machine_code import Kernel, MachineCode
from services.tokenizer.tests.builders import REPOSITORY, make_documents, published, run, write_documents, write_recipe

ARGUMENTS = examples_of_arguments(np.dtype(np.uint16))["rehash"]


class Compiler:
    """Stands for numba, which takes seconds."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> MachineCode:
        time.sleep(0.1)
        self.compiled.append(name)
        return MachineCode("symbol", ("uint64[]",), f"code of {name}".encode())


def test_workers_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler = Compiler()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler), range(4)))

    assert compiler.compiled == ["rehash"]
    assert {code.object_file for code in found} == {b"code of rehash"}


@pytest.mark.parametrize("at", [5, -3])
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, at: int) -> None:
    compiler = Compiler()
    read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler)
    [path] = tmp_path.glob("*.kernel")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)

    assert read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler).object_file == b"code of rehash"
    assert compiler.compiled == ["rehash", "rehash"]
    read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler)
    assert len(compiler.compiled) == 2


def test_a_kernel_under_the_name_of_another_one_is_compiled_anew(tmp_path: Path) -> None:
    """The name says for which processor the code is."""
    compiler = Compiler()
    read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler)
    [path] = tmp_path.glob("*.kernel")
    read_or_compile(tmp_path, "encode", ARGUMENTS, compiler)
    [other] = set(tmp_path.glob("*.kernel")) - {path}
    other.replace(path)

    assert read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler).object_file == b"code of rehash"


def test_a_pipe_in_place_of_a_kernel_is_replaced(tmp_path: Path) -> None:
    compiler = Compiler()
    read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler)
    [path] = tmp_path.glob("*.kernel")
    path.unlink()
    os.mkfifo(path)

    assert read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler).object_file == b"code of rehash"
    assert path.is_file()


def test_nobody_waits_without_end_for_a_compiling_process_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler()
    monkeypatch.setattr(kernel_store, "LONGEST_COMPILATION_SECONDS", 0.0)
    with (tmp_path / "compiling.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler).object_file == b"code of rehash"
    assert compiler.compiled == ["rehash"]
    assert len(list(tmp_path.glob("*.kernel"))) == 1


def test_code_for_another_processor_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler)
    for variable, value in common_processor().items():
        monkeypatch.setenv(variable, value)
    read_or_compile(tmp_path, "rehash", ARGUMENTS, compiler)
    assert len(compiler.compiled) == 2


def test_a_kernel_refuses_arguments_that_it_was_not_compiled_for() -> None:
    rehash: Kernel = load_kernels(np.dtype(np.uint16)).rehash
    words = np.zeros(8, np.uint64)
    with pytest.raises(TypeError, match="int64"):
        rehash(words, words.astype(np.int64))
    with pytest.raises(ValueError, match="contiguous"):
        rehash(words, words[::2])
    assert rehash(words, words.copy()) == 0


WITHOUT_NUMBA = """
import sys
from services.tokenizer.command import main
code = main(sys.argv[1:])
print(sorted({"numba", "pandas"} & sys.modules.keys()), code)
"""


def test_the_reference_needs_no_compiler(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text", make_documents(60))
    recipe = write_recipe(tmp_path, text)
    command = [sys.executable, "-c", WITHOUT_NUMBA, "--recipe", str(recipe), "--root", str(tmp_path / "fsx")]
    options = ["--launch", "inline", '--tokenizer.encoder="reference"']
    done = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.stdout.endswith("[] 0\n"), done.stderr
    assert run(recipe, tmp_path / "kernel") == 0
    digests = {published(tmp_path / name).manifest.content_digest for name in ("fsx", "kernel")}
    assert len(digests) == 1


def test_a_run_after_the_first_imports_no_compiler_and_no_pandas(tmp_path: Path) -> None:
    """The two take a second of every process."""
    load_kernels(np.dtype(np.uint16))
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", make_documents(60)))
    command = [sys.executable, "-c", WITHOUT_NUMBA, "--recipe", str(recipe), "--root", str(tmp_path / "fsx")]
    done = subprocess.run([*command, "--launch", "inline"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("[] 0\n"), done.stderr
