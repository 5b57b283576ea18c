"""Starts processes that publish and then die, freeze or wait, for the tests of leases and artifacts."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

from services.common.artifacts import process
from services.common.artifacts.attempt import ATTEMPT_VARIABLE
from services.common.artifacts.store import Draft, Workspace
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Recipe
from services.common.testing import fork_server
from services.common.testing.artifacts import fill, publish
from services.common.testing.operations import count_operations
from services.common.testing.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]

fork_server.preload(__name__)


def make_site_that_imports_torch_xla(folder: Path) -> Path:
    """Make a folder for PYTHONPATH that lets every Python process import torch_xla, which is an empty module here."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import torch_xla\n", encoding="utf-8")
    (site / "torch_xla.py").touch()
    return site


def write_foreign_lock(path: Path, beats: int = 0, attempt: Any = "") -> None:
    """Write the lock of a writer on another machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    process = {"node": "another-machine", "pid": 1, "started": "1 ticks after boot"}
    owner = {"token": "f" * 32, **process, "attempt": attempt, "beats": beats}
    path.write_text(json.dumps(owner), encoding="utf-8")


def publish_and_die(root: Path, recipe: Recipe, fatal_operation: int) -> None:
    """Publish in a process that kills itself before its n-th operation on the file system below `root`.

    If it does not die, it exits with the number of operations.
    """
    operations = count_operations(root, fatal_operation)
    publish(root, recipe)
    os._exit(len(operations))


def publish_elsewhere_and_freeze(root: Path, recipe: Recipe, operation: int) -> None:
    """Publish under the name of another machine, in a process that stops itself before its n-th operation.

    It ends with the exit code of a command, and writes `<root>.log`.
    """
    logging.basicConfig(level=logging.INFO, filename=f"{root}.log", force=True)
    process.node_name = lambda: "another-machine"
    count_operations(root, operation, signal.SIGSTOP)

    def work() -> int:
        publish(root, recipe)
        return 0

    os._exit(exit_code_of(work))


def publish_slowly(root: Path, recipe: Recipe, name: str) -> None:
    """Publish once the file `go` exists; the files `<name>.building|log|done` show the progress."""
    folder = root.parent
    logging.basicConfig(level=logging.INFO, filename=folder / f"{name}.log", force=True)

    def build(workspace: Workspace) -> Draft:
        (folder / f"{name}.building").touch()
        wait_until((folder / "go").exists)
        return fill(workspace)

    artifact, is_new = publish(root, recipe, build=build)
    partial = folder / f"{name}.tmp"
    partial.write_text(f"{artifact.manifest.content_digest} {is_new}", encoding="utf-8")
    partial.rename(folder / f"{name}.done")


def publish_slowly_in_attempt(root: Path, recipe: Recipe, attempt: str) -> None:
    """Run `publish_slowly` as an attempt under the name of another machine, and end with the exit code of a command."""
    os.environ[ATTEMPT_VARIABLE] = attempt
    process.node_name = lambda: f"pod of {attempt}"

    def work() -> int:
        publish_slowly(root, recipe, "given-up")
        return 0

    os._exit(exit_code_of(work))
