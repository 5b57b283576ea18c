"""`python -m services.common.artifacts` sees through links what stages see, and removes nothing behind one."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.artifacts.__main__ import main
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import SCRATCH_SUFFIX, discard, find_artifact
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Recipe
from services.common.testing.artifacts import ID, address_in, publish
from services.common.testing.recipes import make_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fsx"


def run(*arguments: str | Path) -> int:
    return exit_code_of(lambda: main([str(argument) for argument in arguments]))


def move_to_another_disk(path: Path, disk: Path) -> Path:
    """Move a file or folder to `disk`, leave a link, and return the new place."""
    disk.mkdir(exist_ok=True)
    moved = path.rename(disk / "moved")
    path.symlink_to(moved)
    return moved


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("linked", ["", "compile_cache", *(f"compile_cache/small/{name}" for name in ("", ID))])
def test_the_command_and_a_stage_agree_on_an_artifact_behind_a_link(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str, is_damaged: bool
) -> None:
    artifact, _ = publish(root, recipe)
    if is_damaged:
        (artifact.path / "graphs/two.bin").write_bytes(b"TWO" * 100)
    move_to_another_disk(root / linked, tmp_path / "disk")

    def read() -> int:
        found = find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make")
        verify_files(found.path, found.manifest)
        return 0

    assert run("verify", root) == exit_code_of(read) == (3 if is_damaged else 0)
    assert run("gc", root, "--unreferenced", "--yes") == 0
    assert (artifact.path / "three.json").exists()


@pytest.mark.parametrize("linked", ["compile_cache", "compile_cache/small"])
def test_gc_leaves_what_another_root_owns_and_says_so(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two roots share caches. A cache that this root refers to no more may be in use by the other's runs."""
    other = tmp_path / "other"
    for identifier in ("a" * 16, "b" * 16):
        publish(other, recipe, identifier)
    collection = address_in(other).collection
    left = [collection / ("a" * 16), collection / f"{'d' * 16}{SCRATCH_SUFFIX}"]
    left[1].mkdir()
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(other / linked)

    assert run("gc", root, "--unreferenced", "--yes") == 0

    printed = capsys.readouterr().out
    assert [path.exists() and str(root / "compile_cache/small" / path.name) in printed for path in left] == [True] * 2
    assert run("gc", other, "--unreferenced", "--yes") == 0
    assert [path for path in left if path.exists()] == []


def test_a_stage_that_replaces_a_linked_artifact_leaves_what_the_link_leads_to(
    root: Path, recipe: Recipe, tmp_path: Path
) -> None:
    """A link in the place of an artifact that is made anew is moved aside, and `gc` removes the link."""
    artifact, _ = publish(root, recipe)
    (artifact.path / MANIFEST).unlink()
    moved = move_to_another_disk(artifact.path, tmp_path / "disk")

    publish(root, recipe)
    assert run("gc", root) == 0

    assert [path for path in artifact.path.parent.iterdir() if path.is_symlink()] == []
    assert (moved / "three.json").exists()


def test_a_removed_artifact_that_is_a_link_leaves_what_the_link_leads_to(
    root: Path, recipe: Recipe, tmp_path: Path
) -> None:
    artifact, _ = publish(root, recipe)
    moved = move_to_another_disk(artifact.path, tmp_path / "disk")

    discard(artifact.path)

    assert not artifact.path.is_symlink()
    assert (moved / MANIFEST).exists()
