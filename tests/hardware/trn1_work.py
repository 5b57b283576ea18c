"""Programs of the workers in the tests on trn1, in a module that other processes import."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from services.common.launch.launcher import WorkerEnvironment


def open_core(folder: Path, environment: WorkerEnvironment) -> None:
    """Open this worker's core; writes the changed environment variables and torch_xla's view of the core to a file."""
    before = dict(os.environ)
    torch_xla = importlib.import_module("torch_xla")
    core = str(torch_xla.device())
    runtime = importlib.import_module("torch_xla.runtime")
    found = {
        "core": core,
        "kind": runtime.device_type(),
        "processes": runtime.process_count(),
        "index": runtime.process_index(),
        "devices": runtime.global_device_count(),
        "changed": {name: [was, os.environ.get(name)] for name, was in before.items() if os.environ.get(name) != was},
    }
    (folder / f"{environment.rank}.json").write_text(json.dumps(found), encoding="utf-8")
