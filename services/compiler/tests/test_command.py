"""The compiler's command: signals, missing tools, a full disk.

tests/integration holds what the command publishes, also after a kill: a compilation takes half a minute.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.common.process.entry_point import exit_code_of
from services.common.testing.commands import start_python
from services.common.testing.disks import mounted
from services.common.testing.recipes import write_recipe
from services.common.testing.waiting import wait_until
from services.compiler.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[3]

SOONER = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
"""Environment that skips what Inductor compiles outside of the cache before its first kernel: 20 s of CPU."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command; the test's end kills processes that are left."""
    recipe = write_recipe(
        tmp_path, model__num_hidden_layers=1, parallel__data_parallel_size=2, batch__global_batch_size=4
    )
    started: list[subprocess.Popen[str]] = []

    def command(root: Path = tmp_path / "fsx") -> subprocess.Popen[str]:
        words = ["-m", "services.compiler", "--recipe", str(recipe), "--root", str(root)]
        started.append(start_python(words, **SOONER))
        return started[-1]

    yield command
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _published(root: Path) -> list[Path]:
    return [path for path in root.glob("compile_cache/*/*/manifest.json") if ".partial" not in str(path)]


def test_ctrl_c_publishes_nothing_and_leaves_no_process(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process, root = start(), tmp_path / "fsx"
    wait_until(lambda: any(root.glob("compile_cache/*/*.scratch/*/compile/cache/*/*")), 120, process=process)
    at_work = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not _published(root)
    _, alive = psutil.wait_procs(at_work, timeout=30)
    assert not alive


def test_without_a_compiler_the_message_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--recipe", str(write_recipe(tmp_path)), "--root", str(tmp_path / "fsx")]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exit_code_of(lambda: main(options)) == 4
    assert "apt-get install g++" in capfd.readouterr().err
    assert not (tmp_path / "fsx").exists()


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_variable_that_turns_compilation_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], variable: str
) -> None:
    options = ["--recipe", str(write_recipe(tmp_path)), "--root", str(tmp_path / "fsx")]
    monkeypatch.setenv(variable, "1")
    assert exit_code_of(lambda: main(options)) == 4
    assert f"unset {variable}" in capfd.readouterr().err
    assert not (tmp_path / "fsx").exists()


def test_a_full_disk_exits_with_5_and_says_where(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "44k") as disk:
        process = start(disk)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 5, output
        assert re.search(rf"{re.escape(str(disk))}\S+/compile: .* disk", output), output
        assert not _published(disk)
