"""Starts processes that publish and then die or wait, for the tests of locks and artifacts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from services.common.artifacts.store import Draft, Workspace
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


def publish_and_die(root: Path, recipe: Recipe, fatal_operation: int) -> None:
    """Publish in a process that kills itself before its n-th operation on the file system below `root`.

    If it does not die, it exits with the number of operations.
    """
    operations = count_operations(root, fatal_operation)
    publish(root, recipe)
    os._exit(len(operations))


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
