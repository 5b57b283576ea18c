"""An artifact is published once, and completely or not at all, whichever writer is killed at whatever moment."""

from __future__ import annotations

import errno
import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from services.common.artifacts import lease
from services.common.artifacts.attempt import ATTEMPT_VARIABLE
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.lease import Lease
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import (
    CURRENT,
    LOCK_SUFFIX,
    Artifact,
    Draft,
    Workspace,
    find_artifact,
    open_artifact,
    published_ids,
)
from services.common.errors import ArtifactError, TryAgain
from services.common.recipe.schema import Recipe
from services.common.testing.artifacts import FILES, ID, address_in, fill, publish
from services.common.testing.file_opens import noticing_opens
from services.common.testing.fork_server import start_process
from services.common.testing.recipes import make_recipe
from services.common.testing.waiting import wait_until
from services.common.tests.builders import (
    publish_and_die,
    publish_elsewhere_and_freeze,
    publish_slowly,
    publish_slowly_in_attempt,
    write_foreign_lock,
)

NEVER = 10**6
SHORT_LEASE_SECONDS = 0.2


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fsx"


def test_a_published_artifact_holds_what_the_stage_wrote(root: Path, recipe: Recipe) -> None:
    artifact, is_new = publish(root, recipe)

    assert is_new
    assert {entry.path: (artifact.path / entry.path).read_bytes() for entry in artifact.manifest.files} == FILES
    assert sorted(path.name for path in artifact.path.parent.iterdir()) == [ID, CURRENT]


def test_publishing_again_builds_nothing(root: Path, recipe: Recipe) -> None:
    first, _ = publish(root, recipe)

    def build(workspace: Workspace) -> Draft:
        raise AssertionError("built again")

    second, is_new = publish(root, recipe, build=build)

    assert not is_new
    assert second == first


def test_publishing_again_opens_the_manifest_alone(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / "three.json").write_bytes(b"[]")

    with noticing_opens(artifact.path) as opens:
        again, is_new = publish(root, recipe)

    assert (again, is_new) == (artifact, False)
    assert opens.paths == [artifact.path / MANIFEST]


def test_a_published_artifact_whose_manifest_is_torn_is_reported_and_not_built_again(
    root: Path, recipe: Recipe
) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / MANIFEST).write_bytes(b"{")

    with pytest.raises(ArtifactError, match=r"manifest.json: damaged"):
        publish(root, recipe)

    assert (artifact.path / MANIFEST).read_bytes() == b"{"


def test_killed_at_any_operation_it_leaves_nothing_or_the_complete_artifact(tmp_path: Path, recipe: Recipe) -> None:
    counted = start_process(publish_and_die, tmp_path / "whole", recipe, NEVER)
    counted.join()
    num_operations = counted.exitcode or 0
    assert num_operations > 25
    expected = open_artifact(address_in(tmp_path / "whole").path, CompileCacheManifest).manifest.content_digest
    visible_after = []

    for operation in range(num_operations):
        root = tmp_path / f"killed-before-{operation}"
        victim = start_process(publish_and_die, root, recipe, operation)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        if published_ids(address_in(root).collection):
            visible_after.append(operation)
            verify_files(address_in(root).path, open_artifact(address_in(root).path, CompileCacheManifest).manifest)
        artifact, _ = publish(root, recipe)
        verify_files(artifact.path, artifact.manifest)
        assert artifact.manifest.content_digest == expected
        assert find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make") == artifact

    assert 0 < len(visible_after) < num_operations


def test_two_writers_publish_once(tmp_path: Path, root: Path, recipe: Recipe) -> None:
    first = start_process(publish_slowly, root, recipe, "first")
    wait_until((tmp_path / "first.building").exists)
    second = start_process(publish_slowly, root, recipe, "second")
    log = tmp_path / "second.log"
    wait_until(lambda: log.exists() and "waiting for it" in log.read_text())
    (tmp_path / "go").touch()
    first.join()
    second.join()

    digest = open_artifact(address_in(root).path, CompileCacheManifest).manifest.content_digest
    assert (tmp_path / "first.done").read_text() == f"{digest} True"
    assert (tmp_path / "second.done").read_text() == f"{digest} False"
    assert not (tmp_path / "second.building").exists()


def test_the_killed_waiter_of_two_leaves_the_other_alone(tmp_path: Path, root: Path, recipe: Recipe) -> None:
    writer = start_process(publish_slowly, root, recipe, "writer")
    wait_until((tmp_path / "writer.building").exists)
    waiter = start_process(publish_slowly, root, recipe, "waiter")
    log = tmp_path / "waiter.log"
    wait_until(lambda: log.exists() and "waiting for it" in log.read_text())
    waiter.kill()
    waiter.join()
    (tmp_path / "go").touch()
    writer.join()

    assert (tmp_path / "writer.done").read_text().endswith("True")


def test_an_attempt_that_was_given_up_and_still_works_publishes_nothing(
    tmp_path: Path, root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deploy Job gave up a pod that lives on behind a broken network and still reaches the file system."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", NEVER)
    given_up = start_process(publish_slowly_in_attempt, root, recipe, "trainer-0a1b2c/1")
    wait_until((tmp_path / "given-up.building").exists)

    monkeypatch.setenv(ATTEMPT_VARIABLE, "trainer-0a1b2c/2")
    artifact, is_new = publish(root, recipe)
    before = sorted(path.stat().st_ino for path in artifact.path.rglob("*"))
    assert is_new
    assert given_up.is_alive()
    (tmp_path / "go").touch()
    given_up.join()

    assert given_up.exitcode == TryAgain.exit_code
    verify_files(artifact.path, artifact.manifest)
    assert sorted(path.stat().st_ino for path in artifact.path.rglob("*")) == before


def test_a_writer_that_lost_its_lease_publishes_nothing(root: Path, recipe: Recipe) -> None:
    lock = address_in(root).beside(LOCK_SUFFIX)

    def build(workspace: Workspace) -> Draft:
        write_foreign_lock(lock)
        return fill(workspace)

    with pytest.raises(TryAgain, match=f"{lock}: .*lost"):
        publish(root, recipe, build=build)

    assert published_ids(address_in(root).collection) == []
    assert "another-machine" in lock.read_text()


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_that_was_frozen_anywhere_and_overtaken_damages_nothing(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """The frozen writer wakes up while the next one works, which takes its machine for dead."""
    counted = start_process(publish_and_die, tmp_path / "whole", recipe, NEVER)
    counted.join()
    monkeypatch.setattr(lease, "LEASE_SECONDS", SHORT_LEASE_SECONDS)
    ends = []
    for operation in range(0, counted.exitcode or 0, stride):
        root = tmp_path / f"frozen-before-{operation}"
        artifact, sleeper = publish_over_the_head_of_a_frozen_one(root, recipe, operation)
        ends.append(sleeper.exitcode)

        verify_files(artifact.path, artifact.manifest)
        assert {entry.path: (artifact.path / entry.path).read_bytes() for entry in artifact.manifest.files} == FILES
        assert find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make") == artifact
    assert set(ends) == {0, TryAgain.exit_code}


def publish_over_the_head_of_a_frozen_one(
    root: Path, recipe: Recipe, operation: int
) -> tuple[Artifact[CompileCacheManifest], ForkServerProcess]:
    sleeper = start_process(publish_elsewhere_and_freeze, root, recipe, operation)
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)

    def wake() -> None:
        if sleeper.exitcode is None:
            os.kill(sleeper.pid or 0, signal.SIGCONT)
        log = Path(f"{root}.log")
        wait_until(lambda: sleeper.exitcode is not None or "waiting for it" in log.read_text())

    def build(workspace: Workspace) -> Draft:
        wake()
        return fill(workspace)

    try:
        artifact, _ = publish(root, recipe, build=build)
    except TryAgain:  # the sleeper's next operation was to rename what it had finished
        artifact, _ = publish(root, recipe)
    wake()
    sleeper.join()
    return artifact, sleeper


def test_of_two_writers_that_both_believe_to_hold_the_lease_one_publishes(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = []

    def build(workspace: Workspace) -> Draft:
        address_in(root).beside(LOCK_SUFFIX).unlink()
        first.append(publish(root, recipe)[0])
        monkeypatch.setattr(Lease, "is_held", lambda held: True)
        return fill(workspace, {"graphs/other.bin": b"other"})

    with pytest.raises(TryAgain, match=f"{ID}: another writer published"):
        publish(root, recipe, build=build)

    assert publish(root, recipe) == (first[0], False)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_a_commit_whose_answer_is_lost_is_a_commit(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A network file system sends a request again when it hears nothing, and then finds nothing left to rename."""
    rename = Path.rename

    def answer_wrongly(path: Path, target: Path) -> Path:
        rename(path, target)
        if target == address_in(root).path:
            raise OSError(number, os.strerror(number))
        return target

    monkeypatch.setattr(Path, "rename", answer_wrongly)

    artifact, is_new = publish(root, recipe)

    assert is_new
    verify_files(artifact.path, artifact.manifest)


def test_what_dead_writers_left_is_gone_when_the_next_one_has_published(root: Path, recipe: Recipe) -> None:
    collection = address_in(root).collection
    for name in (f"{ID}.partial", f"{ID}.01234567.partial", f"{ID}.scratch/writer-01234567"):
        (collection / name).mkdir(parents=True)

    publish(root, recipe)

    assert sorted(path.name for path in collection.iterdir()) == [ID, CURRENT]


def test_nothing_is_touched_before_the_lease_is_held(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = address_in(root).collection
    (collection / f"{ID}.partial").mkdir(parents=True)
    (collection / ID).mkdir()
    write_foreign_lock(address_in(root).beside(LOCK_SUFFIX))
    before = sorted(collection.iterdir())

    def give_up(seconds: float) -> None:
        raise TryAgain("terminated while it waits")

    monkeypatch.setattr("time.sleep", give_up)
    with pytest.raises(TryAgain, match="while it waits"):
        publish(root, recipe)

    assert sorted(collection.iterdir()) == before


def test_a_failed_build_publishes_nothing_and_frees_the_lock(root: Path, recipe: Recipe) -> None:
    def build(workspace: Workspace) -> Draft:
        fill(workspace)
        raise ArtifactError("no")

    with pytest.raises(ArtifactError):
        publish(root, recipe, build=build)

    assert published_ids(address_in(root).collection) == []
    assert not address_in(root).beside(LOCK_SUFFIX).exists()


def test_scratch_work_of_an_interrupted_build_is_there_for_the_next(root: Path, recipe: Recipe) -> None:
    def stop_halfway(workspace: Workspace) -> Draft:
        (workspace.scratch / "expensive").write_text("result")
        raise TryAgain("preempted")

    with pytest.raises(TryAgain):
        publish(root, recipe, build=stop_halfway)
    found = []

    def build(workspace: Workspace) -> Draft:
        found.append((workspace.scratch / "expensive").read_text())
        return fill(workspace)

    publish(root, recipe, build=build)

    assert found == ["result"]


def test_a_folder_that_lost_its_manifest_is_displaced_and_not_lost(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / MANIFEST).unlink()
    (artifact.path / "notes.txt").write_text("mine")

    again, is_new = publish(root, recipe)

    assert is_new
    assert again.manifest.content_digest == artifact.manifest.content_digest
    (displaced,) = artifact.path.parent.glob("*.displaced-*")
    assert (displaced / "notes.txt").read_text() == "mine"


def test_the_newest_artifact_of_a_recipe_is_found(root: Path, recipe: Recipe) -> None:
    publish(root, recipe, "a" * 16)
    newest, _ = publish(root, recipe, "b" * 16)

    assert find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make") == newest


def test_without_an_artifact_for_the_recipe_the_command_that_makes_one_is_named(
    tmp_path: Path, root: Path, recipe: Recipe
) -> None:
    publish(root, recipe)
    other = make_recipe(tmp_path, model__hidden_size="32")

    with pytest.raises(ArtifactError, match=rf"{ID}.*make it"):
        find_artifact(root, "compile_cache", "small", other, CompileCacheManifest, "make it")


@pytest.mark.parametrize("content", [None, b"", b'{"a', b"[]", b'{"lost": "0000000000000000"}'])
def test_a_lost_or_torn_current_json_is_rebuilt(root: Path, recipe: Recipe, content: bytes | None) -> None:
    artifact, _ = publish(root, recipe)
    current = artifact.path.parent / CURRENT
    current.unlink()
    if content is not None:
        current.write_bytes(content)

    assert find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make") == artifact


def test_current_json_is_not_rebuilt_past_a_damaged_manifest(root: Path, recipe: Recipe) -> None:
    """The damaged artifact may be the newest, and an older one in its place would be other data without a warning."""
    publish(root, recipe, "a" * 16)
    newest, _ = publish(root, recipe, "b" * 16)
    (newest.path / MANIFEST).write_bytes(b"{")
    (newest.path.parent / CURRENT).unlink()

    with pytest.raises(ArtifactError, match=f"{newest.path.name}/{MANIFEST}: damaged"):
        find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make")
