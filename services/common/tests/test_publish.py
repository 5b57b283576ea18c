"""An artifact is published once, and completely or not at all, whichever writer is killed; a lock has one holder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.lock import LockTaken, find_holder, hold_lock
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import (
    CURRENT,
    LOCK_SUFFIX,
    Draft,
    Workspace,
    find_artifact,
    open_artifact,
    published_ids,
)
from services.common.errors import ArtifactError, StorageError, TryAgain
from services.common.recipe.schema import Recipe
from services.common.testing import fork_server
from services.common.testing.artifacts import FILES, ID, address_in, fill, publish
from services.common.testing.file_opens import noticing_opens
from services.common.testing.fork_server import start_process
from services.common.testing.recipes import make_recipe
from services.common.testing.waiting import wait_until
from services.common.tests import work

fork_server.preload(__name__, work.__name__)

NEVER = 10**6


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


def test_publishing_again_builds_nothing_and_opens_the_manifest_alone(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / "three.json").write_bytes(b"[]")

    def build(workspace: Workspace) -> Draft:
        raise AssertionError("built again")

    with noticing_opens(artifact.path) as opens:
        again, is_new = publish(root, recipe, build=build)

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
    counted = start_process(work.publish_and_die, tmp_path / "whole", recipe, NEVER)
    counted.join()
    num_operations = counted.exitcode or 0
    assert num_operations > 25
    expected = open_artifact(address_in(tmp_path / "whole").path, CompileCacheManifest).manifest.content_digest
    visible_after = []

    for operation in range(num_operations):
        root = tmp_path / f"killed-before-{operation}"
        victim = start_process(work.publish_and_die, root, recipe, operation)
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        if published_ids(address_in(root).collection):
            visible_after.append(operation)
            verify_files(address_in(root).path, open_artifact(address_in(root).path, CompileCacheManifest).manifest)
        artifact, _ = publish(root, recipe)
        verify_files(artifact.path, artifact.manifest)
        assert artifact.manifest.content_digest == expected
        assert find_artifact(root, "compile_cache", "cpu", recipe, CompileCacheManifest, "make") == artifact

    assert 0 < len(visible_after) < num_operations


def test_a_late_writer_publishes_nothing_over_another(root: Path, recipe: Recipe) -> None:
    """A worker of a killed command may outlive the command's lock."""
    first = []

    def build(workspace: Workspace) -> Draft:
        address_in(root).beside(LOCK_SUFFIX).unlink()
        first.append(publish(root, recipe)[0])
        workspace.files.mkdir()
        return fill(workspace, {"graphs/other.bin": b"other"})

    with pytest.raises(TryAgain):
        publish(root, recipe, build=build)

    assert publish(root, recipe) == (first[0], False)


def test_a_folder_that_lost_its_manifest_is_displaced_and_not_lost(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / MANIFEST).unlink()
    (artifact.path / "notes.txt").write_text("mine")

    again, is_new = publish(root, recipe)

    assert is_new
    assert again.manifest.content_digest == artifact.manifest.content_digest
    (displaced,) = artifact.path.parent.glob("*.displaced-*")
    assert (displaced / "notes.txt").read_text() == "mine"


def test_the_newest_artifact_of_a_recipe_is_found(tmp_path: Path, root: Path, recipe: Recipe) -> None:
    publish(root, recipe, "a" * 16)
    newest, _ = publish(root, recipe, "b" * 16)

    assert find_artifact(root, "compile_cache", "cpu", recipe, CompileCacheManifest, "make") == newest
    other = make_recipe(tmp_path, model__hidden_size="32")
    with pytest.raises(ArtifactError, match="make it"):
        find_artifact(root, "compile_cache", "cpu", other, CompileCacheManifest, "make it")


@pytest.mark.parametrize("content", [None, b'{"a', b'{"lost": "0000000000000000"}'])
def test_a_lost_or_torn_current_json_is_rebuilt(root: Path, recipe: Recipe, content: bytes | None) -> None:
    artifact, _ = publish(root, recipe)
    current = artifact.path.parent / CURRENT
    current.unlink()
    if content is not None:
        current.write_bytes(content)

    assert find_artifact(root, "compile_cache", "cpu", recipe, CompileCacheManifest, "make") == artifact


def test_current_json_is_not_rebuilt_past_a_damaged_manifest(root: Path, recipe: Recipe) -> None:
    """The damaged artifact may be the newest, and an older one in its place would be other data without a warning."""
    publish(root, recipe, "a" * 16)
    newest, _ = publish(root, recipe, "b" * 16)
    (newest.path / MANIFEST).write_bytes(b"{")
    (newest.path.parent / CURRENT).unlink()

    with pytest.raises(ArtifactError, match=f"{newest.path.name}/{MANIFEST}: damaged"):
        find_artifact(root, "compile_cache", "cpu", recipe, CompileCacheManifest, "make")


ROUNDS, WRITERS = 12, 4


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "run" / "0123456789abcdef.lock"


def hold(lock: Path) -> None:
    """Hold the lock until the process is killed, as does a child that it has forked."""
    with hold_lock(lock):
        if os.fork() == 0:
            lock.with_name("forked").touch()  # here: from now on the child has no lock
        threading.Event().wait(60)


def count(lock: Path) -> None:
    """Add ROUNDS to a number in a file, which loses some where two processes have the lock at a time."""
    number = lock.with_name("number")
    for _ in range(ROUNDS):
        with hold_lock(lock):
            value = int(number.read_text())
            time.sleep(0.0005)
            number.write_text(str(value + 1))


def test_of_many_writers_one_at_a_time_holds_a_lock_that_each_removes(lock: Path) -> None:
    lock.parent.mkdir()
    lock.with_name("number").write_text("0")
    writers = [start_process(count, lock) for _ in range(WRITERS)]
    for writer in writers:
        writer.join()

    assert int(lock.with_name("number").read_text()) == ROUNDS * WRITERS
    assert not lock.exists()


def test_a_killed_holder_frees_the_lock_although_its_child_lives(lock: Path) -> None:
    holder = start_process(hold, lock)
    wait_until(lock.with_name("forked").exists)
    assert find_holder(lock) == f"process {holder.pid} on {os.uname().nodename}"
    with pytest.raises(LockTaken) as taken, hold_lock(lock, waits=False):
        pass
    assert taken.value.exit_code == 75
    holder.kill()
    holder.join()

    assert find_holder(lock) is None
    with hold_lock(lock, waits=False):
        assert find_holder(lock)


def test_a_holders_child_neither_frees_nor_keeps_the_lock(lock: Path) -> None:
    with hold_lock(lock):
        holding = os.getpid()
        child = os.fork()
        if child:
            wait_until(lock.with_name("left").exists)
            assert find_holder(lock)
    if os.getpid() != holding:
        lock.with_name("left").touch()
        time.sleep(60)
    try:
        with hold_lock(lock, waits=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_mount_without_flock_is_a_storage_error(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError), hold_lock(lock):
        pass
