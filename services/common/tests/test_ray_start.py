"""A command ends with 75 where a process of the Ray that it starts is lost before the start is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = pytest.mark.slow

PROGRAM = """
import importlib, sys
from services.common.process.entry_point import run_program
from services.common.launch import ray_cluster

module, function, name = sys.argv[1:]
library = importlib.import_module(module)
real, popen, started = getattr(library, function), ray_cluster.ray._private.services.ConsolePopen, []

class Popen(popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        started.append(self)

def lose(*arguments, **options):
    [process] = [each for each in started if each.args[0].endswith(name)]
    process.kill()
    process.wait()
    return real(*arguments, **options)

def main(arguments):
    ray_cluster.connect(1)
    return 0

ray_cluster.ray._private.services.ConsolePopen = Popen
setattr(library, function, lose)
run_program(main)
"""


@pytest.mark.parametrize(
    ("function", "name", "told"),
    [
        ("ray._private.node wait_for_persisted_port", "gcs_server", "its process gcs_server ended with -9"),
        ("ray._private.services start_raylet", "gcs_server", "its process gcs_server ended with -9"),
        ("ray._private.worker connect", "raylet", "its process raylet ended with -9"),
        ("ray._raylet CoreWorker", "gcs_server", "its gcs_server or its raylet did not answer"),
        ("ray._raylet CoreWorker", "raylet", "its gcs_server or its raylet did not answer"),
    ],
)
def test_a_process_lost_while_ray_starts_ends_the_command_with_75(
    tmp_path: Path, function: str, name: str, told: str
) -> None:
    """The process is killed when Ray's library calls the function."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, *function.split(), name]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    assert ended.returncode == 75, ended.stderr
    assert f"Ray did not start on this machine: {told}" in ended.stderr
    assert "Traceback" not in ended.stderr
