"""`python -m services.common.artifacts` verifies, shows, lists and cleans up artifacts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from services.common.artifacts.__main__ import main
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import (
    LOCK_SUFFIX,
    PARTIAL_SUFFIX,
    SCRATCH_SUFFIX,
    Draft,
    Workspace,
    find_artifact,
    make_partial,
    published_ids,
)
from services.common.artifacts.upstream import find_cache
from services.common.errors import UnreadableError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Recipe
from services.common.testing.artifacts import ID, address_in, fill, publish, publish_checkpoint
from services.common.testing.manifests import reseal
from services.common.testing.recipes import make_recipe

OLD, NEW, DEAD = "a" * 16, "b" * 16, "d" * 16
RUN = "run-01234567"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fsx"


@pytest.fixture
def superseded(root: Path, recipe: Recipe) -> Path:
    """Publish two artifacts of one recipe and return the first; `current.json` names the second."""
    superseded, _ = publish(root, recipe, OLD)
    publish(root, recipe, NEW)
    return superseded.path


def run(*arguments: str | Path) -> int:
    return exit_code_of(lambda: main([str(argument) for argument in arguments]))


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "file").touch()
    return path


@pytest.mark.parametrize("command", ["verify", "list"])
def test_what_is_published_is_named_and_what_is_damaged_ends_with_3(
    root: Path, superseded: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = superseded.with_name(NEW)
    shutil.copytree(torn, torn.with_name(f"{'f' * 16}.01234567{PARTIAL_SUFFIX}"))
    assert run(command, root) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (torn / (MANIFEST if command == "list" else "three.json")).write_bytes(b"[]")

    assert run(command, root) == 3

    printed = capsys.readouterr()
    assert str(superseded) in printed.out
    assert str(torn) in printed.err


@pytest.mark.parametrize(("command", "code"), [("verify", 3), ("list", 0), ("gc", 2)])
def test_a_folder_without_artifacts(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / f"poetry{LOCK_SUFFIX}").touch()

    assert run(command, tmp_path) == code
    assert run(command, tmp_path / "nowhere") == 2
    assert (tmp_path / f"poetry{LOCK_SUFFIX}").exists()


def test_show_prints_the_manifest_without_the_file_list(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, _ = publish(root, recipe)

    assert run("show", artifact.path) == 0

    shown = json.loads(capsys.readouterr().out)
    assert isinstance(shown["files"], str)
    assert shown["content_digest"] == artifact.manifest.content_digest
    assert shown["recipe"]["name"] == "small"


def test_gc_removes_what_dead_writers_left_and_nothing_that_no_stage_made(root: Path, recipe: Recipe) -> None:
    """A folder without a manifest may be an artifact that somebody is copying. Compilers keep locks in their caches."""
    inside = {f"graphs/locks/one{LOCK_SUFFIX}": b"", f"graphs/two{PARTIAL_SUFFIX}/three": b""}
    artifact, _ = publish(root, recipe, build=lambda workspace: fill(workspace, inside))
    checkpoint = publish_checkpoint(root, recipe, step=5)
    collection, runs, run_checkpoints = artifact.path.parent, root / "run", root / "checkpoint" / RUN
    left = [
        collection / f"{DEAD}{PARTIAL_SUFFIX}",
        collection / f"{DEAD}.01234567{PARTIAL_SUFFIX}",
        collection / f"{ID}.displaced-01234567{PARTIAL_SUFFIX}",
        collection / f"{ID}.removed-01234567{PARTIAL_SUFFIX}",
        collection / f"{DEAD}{SCRATCH_SUFFIX}",
        run_checkpoints / f"step-00000005.01234567{PARTIAL_SUFFIX}",
    ]
    kept = [
        collection / "experiment.scratch",
        collection / DEAD,
        runs / "old.partial",
        run_checkpoints / "step-00000005",
    ]
    for path in (*left, *kept):
        make_folder(path)
    locks = [collection / f"{DEAD}{LOCK_SUFFIX}", runs / f"{RUN}{LOCK_SUFFIX}", collection / ".current.json.123.tmp"]
    notes = [collection / "notes.lock", collection / ".mine.tmp"]
    for path in (*locks, *notes):
        path.touch()
    copy = shutil.copytree(artifact.path, collection / "mine.partial")

    assert run("gc", root, "--unreferenced", "--yes") == 0

    assert [path for path in (*left, *locks) if path.exists()] == []
    assert [path for path in (*kept, *notes, copy, artifact.path, checkpoint.path) if not path.exists()] == []
    assert run("verify", root) == 0


def test_recipes_of_two_names_share_the_caches_of_their_program(tmp_path: Path, root: Path, recipe: Recipe) -> None:
    """Each finds what the other published, and `gc` keeps the newest for both."""
    renamed = recipe.model_copy(update={"name": "renamed"})
    for identifier, maker in ((OLD, recipe), (NEW, renamed)):
        made, _ = publish(root, maker, identifier)
        assert [find_cache(each, tmp_path / "small.toml", root).path for each in (recipe, renamed)] == [made.path] * 2

    assert run("gc", root, "--unreferenced", "--yes") == 0

    assert published_ids(made.path.parent) == [NEW]


def test_gc_leaves_alone_what_a_live_writer_holds(root: Path, recipe: Recipe) -> None:
    partial = make_folder(root / "checkpoint" / RUN / f"step-00000005.01234567{PARTIAL_SUFFIX}")

    def build(workspace: Workspace) -> Draft:
        draft = fill(workspace)
        (workspace.scratch / "work").touch()
        with hold_lock(root / "run" / f"{RUN}{LOCK_SUFFIX}"):
            assert run("gc", root) == 0
            assert run("gc", root, "--unreferenced", "--yes") == 0
        assert (workspace.scratch / "work").exists()
        return draft

    _, is_new = publish(root, recipe, build=build)

    assert is_new
    assert (partial / "file").exists()


def use_in_a_run(superseded: Path) -> None:
    run_file = make_folder(superseded.parents[2] / "run" / "run-1") / "run.json"
    run_file.write_text(json.dumps({"artifacts": {"compile_cache": superseded.name}}), encoding="utf-8")


def make_another_of_it(superseded: Path) -> None:
    link = {"schema": "compile_cache/1", "path": str(superseded), "id": superseded.name, "content_digest": "0" * 64}
    reseal(superseded.with_name(NEW), lambda fields: fields.update(inputs=[link]))


@pytest.mark.parametrize(
    ("options", "use", "is_held", "is_kept"),
    [
        ((), None, False, True),
        (("--unreferenced",), None, False, True),
        (("--unreferenced", "--yes"), None, False, False),
        (("--unreferenced", "--yes"), None, True, True),
        (("--unreferenced", "--yes"), use_in_a_run, False, True),
        (("--unreferenced", "--yes"), make_another_of_it, False, True),
    ],
)
def test_gc_removes_a_published_artifact_that_nothing_refers_to_where_that_is_asked_for(
    root: Path,
    superseded: Path,
    options: tuple[str, ...],
    use: Callable[[Path], None] | None,
    is_held: bool,
    is_kept: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if use:
        use(superseded)
    with hold_lock(superseded.with_name(superseded.name + LOCK_SUFFIX)) if is_held else nullcontext():
        assert run("gc", root, *options) == 0

    assert (superseded / MANIFEST).exists() == is_kept
    assert (superseded.with_name(NEW) / MANIFEST).exists()
    assert (str(superseded) in capsys.readouterr().out) == (bool(options) and use is None)


@pytest.mark.parametrize(
    ("damaged", "content"), [(MANIFEST, b"{"), ("run.json", b"{"), ("run.json", b'{"artifacts": {"corpus": []}}')]
)
def test_gc_removes_nothing_while_it_cannot_tell_what_is_referred_to(
    root: Path, superseded: Path, damaged: str, content: bytes
) -> None:
    use_in_a_run(superseded.with_name(NEW))
    torn = root / "run" / "run-1" / "run.json" if damaged == "run.json" else superseded.with_name(NEW) / MANIFEST
    torn.write_bytes(content)

    assert run("gc", root, "--unreferenced", "--yes") == 3

    assert superseded.exists()


def move_to_another_disk(path: Path, disk: Path) -> Path:
    """Move a file or folder to `disk`, leave a link, and return the new place."""
    disk.mkdir(exist_ok=True)
    moved = path.rename(disk / "moved")
    path.symlink_to(moved)
    return moved


@pytest.mark.parametrize("linked", ["", f"compile_cache/cpu/{ID}"])
def test_the_command_and_a_stage_agree_on_an_artifact_behind_a_link(
    root: Path, recipe: Recipe, tmp_path: Path, linked: str
) -> None:
    artifact, _ = publish(root, recipe)
    move_to_another_disk(root / linked, tmp_path / "disk")

    def read() -> int:
        found = find_artifact(root, "compile_cache", "cpu", recipe, CompileCacheManifest, "make")
        verify_files(found.path, found.manifest)
        return 0

    assert run("verify", root) == exit_code_of(read) == 0
    assert run("gc", root, "--unreferenced", "--yes") == 0
    assert (artifact.path / "three.json").exists()


def test_gc_leaves_what_another_root_owns_and_says_so(
    root: Path, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two roots share caches. A cache that this root refers to no more may be in use by the other's runs."""
    other = tmp_path / "other"
    for identifier in ("a" * 16, "b" * 16):
        publish(other, recipe, identifier)
    collection = address_in(other).collection
    left = [collection / ("a" * 16), collection / f"{'d' * 16}{SCRATCH_SUFFIX}"]
    left[1].mkdir()
    (root / "compile_cache").parent.mkdir(parents=True)
    (root / "compile_cache").symlink_to(other / "compile_cache")

    assert run("gc", root, "--unreferenced", "--yes") == 0

    printed = capsys.readouterr().out
    assert [path.exists() and str(root / "compile_cache/cpu" / path.name) in printed for path in left] == [True] * 2
    assert run("gc", other, "--unreferenced", "--yes") == 0
    assert [path for path in left if path.exists()] == []


@pytest.mark.parametrize("place", ["compile_cache", "compile_cache/cpu", "compile_cache/cpu/" + "a" * 16])
def test_what_is_on_a_disk_that_is_not_mounted_is_not_taken_for_absent(
    root: Path, recipe: Recipe, superseded: Path, tmp_path: Path, place: str
) -> None:
    move_to_another_disk(root / place, tmp_path / "disk").rename(tmp_path / "unmounted")

    assert [run("verify", root), run("list", root), run("gc", root, "--unreferenced", "--yes")] == [3, 3, 3]
    for open_or_make in (
        lambda: published_ids(superseded.parent),
        lambda: find_artifact(root, "compile_cache", "cpu", recipe, CompileCacheManifest, "make"),
        lambda: make_partial(address_in(root, OLD), "writer"),
    ):
        with pytest.raises(UnreadableError):
            open_or_make()
