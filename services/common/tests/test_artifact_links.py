"""`python -m services.common.artifacts` sees through links what stages see, and removes nothing behind one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.artifacts import lease
from services.common.artifacts.__main__ import main
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.lease import hold_lease
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import LOCK_SUFFIX, SCRATCH_SUFFIX, discard, find_artifact
from services.common.errors import UnreadableError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Recipe
from services.common.testing.artifacts import CORPUS, ID, address_in, publish, publish_checkpoint
from services.common.testing.recipes import make_recipe
from services.common.tests.builders import write_foreign_lock

LINKED = {
    "nothing": None,
    "root": "",
    "kind": "compile_cache",
    "name": "compile_cache/small",
    "id": f"compile_cache/small/{ID}",
    "graphs": f"compile_cache/small/{ID}/graphs",
    "manifest": f"compile_cache/small/{ID}/{MANIFEST}",
}
"""What lies on another disk, with a link to it in its place."""

DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda artifact: None,
    "changed": lambda artifact: (artifact / "graphs/two.bin").write_bytes(b"TWO" * 100),
    "cut": lambda artifact: (artifact / "graphs/two.bin").write_bytes(b""),
    "missing": lambda artifact: (artifact / "graphs/two.bin").unlink(),
    "torn manifest": lambda artifact: (artifact / MANIFEST).write_bytes(b"{"),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fsx"


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.3)


def run(*arguments: str | Path) -> int:
    return exit_code_of(lambda: main([str(argument) for argument in arguments]))


def move_to_another_disk(path: Path, disk: Path) -> Path:
    """Move a file or folder to `disk`, leave a link, and return the new place."""
    disk.mkdir(exist_ok=True)
    moved = path.rename(disk / "moved")
    path.symlink_to(moved)
    return moved


def stage_code(root: Path, recipe: Recipe) -> int:
    """Return the exit code of a stage that opens the artifact of the recipe and reads all its files."""

    def read() -> int:
        found = find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make")
        verify_files(found.path, found.manifest)
        return 0

    return exit_code_of(read)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("linked", LINKED)
def test_the_command_and_a_stage_agree_on_an_artifact_behind_a_link(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str, damage: str
) -> None:
    artifact, _ = publish(root, recipe)
    DAMAGES[damage](artifact.path)
    place = LINKED[linked]
    if place is not None:
        move_to_another_disk(root / place, tmp_path / "disk")

    leads_out_of_the_artifact = linked in ("graphs", "manifest")
    is_unlisted = damage == "torn manifest" or linked == "manifest"
    assert run("verify", root) == (3 if damage != "none" or leads_out_of_the_artifact else 0)
    assert run("verify", root) == stage_code(root, recipe)
    assert run("list", root) == (3 if is_unlisted else 0)
    assert run("gc", root) == 0
    assert run("gc", root, "--unreferenced", "--yes") == (3 if is_unlisted else 0)
    assert (artifact.path / "three.json").exists()


@pytest.mark.parametrize("linked", ["kind", "name", "id"])
def test_an_artifact_on_a_disk_that_is_not_mounted_is_not_taken_for_absent(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str
) -> None:
    publish(root, recipe)
    place = LINKED[linked]
    assert place
    move_to_another_disk(root / place, tmp_path / "disk").rename(tmp_path / "unmounted")

    assert run("verify", root) == stage_code(root, recipe) == 3
    assert run("verify", root / place) == 3
    with pytest.raises(UnreadableError, match="Mount its disk"):
        find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make")


def test_gc_leaves_an_artifact_whose_manifest_is_on_a_disk_that_is_not_mounted(
    root: Path, recipe: Recipe, tmp_path: Path
) -> None:
    artifact, _ = publish(root, recipe)
    move_to_another_disk(artifact.path / MANIFEST, tmp_path / "disk").rename(tmp_path / "unmounted")

    assert run("gc", root) == 0
    assert (artifact.path / "three.json").exists()


def test_a_link_within_an_artifact_is_followed(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / "graphs").rename(artifact.path / "aside")
    (artifact.path / "graphs").symlink_to("aside")

    assert run("verify", root) == stage_code(root, recipe) == 0


@pytest.mark.parametrize("linked", ["", "small-00000000", "small-00000000/step-00000005"])
@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_disk_with_checkpoints_keeps_what_they_were_trained_on(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str, is_mounted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the disk is not mounted, nobody can tell what its checkpoints need."""
    superseded, _ = publish(root, recipe, "a" * 16)
    publish(root, recipe, "b" * 16)
    publish_checkpoint(root, recipe, 5, inputs=(CORPUS.model_copy(update={"id": "a" * 16}),))
    moved = move_to_another_disk(root / "checkpoint" / linked, tmp_path / "disk")
    if not is_mounted:
        moved.rename(tmp_path / "unmounted")

    codes = [run("verify", root), run("list", root), run("gc", root), run("gc", root, "--unreferenced", "--yes")]

    assert codes == ([0, 0, 0, 0] if is_mounted else [3, 3, 0, 3])
    assert ("step-00000005" in capsys.readouterr().out) == (is_mounted or linked.endswith("5"))
    assert superseded.path.exists()


@pytest.mark.parametrize("to", [".", "..", "../..", "loop"])
@pytest.mark.parametrize("place", ["compile_cache", "compile_cache/small"])
def test_a_cycle_of_links_ends(
    root: Path, recipe: Recipe, place: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`loop` leads to itself, which nobody can open; below a kind it is in the place of a collection."""
    publish(root, recipe)
    (root / place / "loop").symlink_to(to)
    is_in_a_place = to == "loop" and place == "compile_cache"

    assert run("verify", root) == (3 if is_in_a_place else 0)

    assert f"ok       {address_in(root).path} " in capsys.readouterr().out
    assert run("gc", root) == 0


def test_two_folders_that_lead_to_each_other_end(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    for one, other in (("one", "other"), ("other", "one")):
        (root / "compile_cache" / one).mkdir()
        (root / "compile_cache" / one / "next").symlink_to(root / "compile_cache" / other)

    assert run("verify", root) == 0
    (artifact.path / "three.json").unlink()
    assert run("verify", root) == 3


@pytest.mark.parametrize("linked", ["compile_cache", "compile_cache/small"])
def test_gc_leaves_what_another_root_owns_and_says_so(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two roots share caches. A cache that this root refers to no more may be in use by the other's runs."""
    other = tmp_path / "other"
    for identifier in ("a" * 16, "b" * 16):
        publish(other, recipe, identifier)
    collection = address_in(other).collection
    left = [
        collection / ("a" * 16),
        collection / f"{'d' * 16}{SCRATCH_SUFFIX}",
        collection / f"{'d' * 16}{LOCK_SUFFIX}",
    ]
    left[1].mkdir()
    write_foreign_lock(left[2])
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(other / linked)

    assert run("gc", root, "--unreferenced", "--yes") == 0

    assert [path for path in left if not path.exists()] == []
    printed = capsys.readouterr().out
    assert [f"leaving {root / 'compile_cache/small' / path.name}: " in printed for path in left] == [True, True, True]
    assert run("gc", other, "--unreferenced", "--yes") == 0
    assert [path for path in left if path.exists()] == []


def test_gc_leaves_a_superseded_artifact_that_is_a_link(
    root: Path, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    superseded, _ = publish(root, recipe, "a" * 16)
    publish(root, recipe, "b" * 16)
    move_to_another_disk(superseded.path, tmp_path / "disk")

    assert run("gc", root, "--unreferenced", "--yes") == 0

    assert f"leaving {superseded.path}: " in capsys.readouterr().out
    assert (superseded.path / MANIFEST).exists()


def test_a_stage_that_replaces_a_linked_artifact_leaves_what_the_link_leads_to(
    root: Path, recipe: Recipe, tmp_path: Path
) -> None:
    """A link in the place of an artifact that is made anew is moved aside, and `gc` removes the link."""
    artifact, _ = publish(root, recipe)
    (artifact.path / MANIFEST).unlink()
    moved = move_to_another_disk(artifact.path, tmp_path / "disk")

    publish(root, recipe)
    assert run("gc", root) == 0

    assert run("verify", root) == 0
    assert not artifact.path.is_symlink()
    assert [path for path in artifact.path.parent.iterdir() if path.is_symlink()] == []
    assert (moved / "three.json").exists()


def test_a_removed_artifact_that_is_a_link_leaves_what_the_link_leads_to(
    root: Path, recipe: Recipe, tmp_path: Path
) -> None:
    artifact, _ = publish(root, recipe)
    moved = move_to_another_disk(artifact.path, tmp_path / "disk")

    with hold_lease(address_in(root).beside(LOCK_SUFFIX)) as held:
        discard(artifact.path, held.lease)

    assert not artifact.path.is_symlink()
    assert (moved / MANIFEST).exists()
