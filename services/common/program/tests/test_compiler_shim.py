"""A run that must not compile for Neuron ends within seconds where a graph is missing, and names the graph."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.testing.commands import run_python

WORK = "/tmp/user/neuroncc_compile_workdir/51f138b2"
GRAPH = "MODULE_4752093806959764898+a8349b9e"
OTHER = "MODULE_13537832482499839909+e30acd3a"

# This does what libneuronxla does for graphs that its cache does not hold, and then what a backend does.
RUN = f"""
import subprocess
from services.common.process.entry_point import run_program
from services.common.program.backends.compiler_shim import forbid_compiler

def ask(*arguments):
    return subprocess.run(["neuronx-cc", *arguments], timeout=60, capture_output=True, text=True)

def main(argv):
    shim = forbid_compiler()
    assert ask("--version").stdout == "real --version\\n"
    assert shim.refusal() is None
    for module in ("{GRAPH}", "{OTHER}", "{GRAPH}"):
        graph = f"{WORK}/model.{{module}}.hlo_module.pb"
        refused = ask("compile", "--framework=XLA", graph, "--output", "model.neff", "--target=trn1")
        assert refused.returncode == 4
        assert module in refused.stderr
    raise shim.refusal()

run_program(main)
"""


def test_missing_graphs_end_the_run_with_4_and_are_named_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other commands than a compilation go to the compiler on PATH."""
    compiler = tmp_path / "real folder" / "neuronx-cc"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "real $*" && exit\nsleep 600\n', encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    done = run_python(["-c", RUN])

    assert done.returncode == 4, done.stdout
    assert "compile.require_warm" in done.stdout
    assert f"{GRAPH}, {OTHER} (2 in all)" in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.glob("millrace-*/shim-*"))
