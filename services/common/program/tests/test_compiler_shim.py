"""A run that must not compile for Neuron ends within seconds where a graph is missing, and names the graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.program.backends.compiler_shim import CompilerShim

REPOSITORY = Path(__file__).resolve().parents[4]
WORK = "/tmp/user/neuroncc_compile_workdir/51f138b2"
GRAPH = "MODULE_4752093806959764898+a8349b9e"
OTHER = "MODULE_13537832482499839909+e30acd3a"

# This does what libneuronxla does for a graph that its cache does not hold, and then what a backend does.
RUN = f"""
import subprocess
from services.common.process.entry_point import run_program
from services.common.program.backends.compiler_shim import forbid_compiler

def main(argv):
    shim = forbid_compiler()
    assert shim.refusal() is None
    graph = "{WORK}/model.{GRAPH}.hlo_module.pb"
    command = ["neuronx-cc", "compile", "--framework=XLA", graph, "--output", "model.neff", "--target=trn1"]
    done = subprocess.run(command, timeout=60)
    assert done.returncode != 0
    raise shim.refusal()

run_program(main)
"""


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a compiler on PATH that must not compile."""
    compiler = tmp_path / "real folder" / "neuronx-cc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "real $*" && exit\nsleep 600\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    return compiler


def test_a_missing_graph_ends_the_run_with_4_and_is_named(real: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 4, done.stderr
    assert "compile.require_warm" in done.stderr
    assert f"{GRAPH} (1 in all)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("millrace-*/shim-*"))


def test_every_graph_is_named_once_and_other_commands_go_to_the_compiler(tmp_path: Path, real: Path) -> None:
    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "neuronx-cc"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    shim = CompilerShim(tmp_path)
    assert ask("--version").stdout == "real --version\n"
    assert shim.refusal() is None

    for module in (GRAPH, OTHER, GRAPH):
        refused = ask("compile", "--framework=XLA", f"{WORK}/model.{module}.hlo_module.pb", "--output", "x")
        assert refused.returncode == 4
        assert module in refused.stderr
    assert f"{GRAPH}, {OTHER} (2 in all)" in str(shim.refusal())
