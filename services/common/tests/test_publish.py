"""Publishing: once, completely or not at all, whoever is killed and whenever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from services.common.artifacts import lease
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.lease import Lease, hold_lease, is_live
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
from services.common.errors import ArtifactError, TryAgain
from services.common.recipe import Recipe
from services.common.tests.builders import (
    FILES,
    ID,
    address_in,
    fill,
    make_recipe,
    publish,
    publish_and_die,
    publish_slowly,
    start_process,
    wait_until,
)

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


def test_publishing_again_builds_nothing(root: Path, recipe: Recipe) -> None:
    first, _ = publish(root, recipe)

    def build(workspace: Workspace) -> Draft:
        raise AssertionError("built again")

    second, is_new = publish(root, recipe, build=build)

    assert not is_new
    assert second == first


def test_a_damaged_artifact_is_not_published_again_but_reported(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    (artifact.path / "three.json").write_bytes(b"[]")

    with pytest.raises(ArtifactError, match=r"three.json: xxh3-128 is"):
        publish(root, recipe)


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
        if published_ids(address_in(root).shelf):
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


def test_the_lock_of_a_killed_writer_is_taken_over_before_its_lease_ends(
    tmp_path: Path, root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", float("inf"))
    writer = start_process(publish_slowly, root, recipe, "killed")
    wait_until((tmp_path / "killed.building").exists)
    writer.kill()
    writer.join()

    _, is_new = publish(root, recipe)

    assert is_new


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


def test_a_writer_on_another_machine_is_live_while_it_refreshes_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / f"{ID}{LOCK_SUFFIX}"
    lock.write_text('{"token": "t", "node": "another machine", "pid": 1, "started": 0.0}')
    assert is_live(lock)

    os.utime(lock, (0, 0))

    assert not is_live(lock)


def test_a_lock_without_content_is_free_once_it_is_old(tmp_path: Path) -> None:
    """As a machine that lost power leaves it."""
    lock = tmp_path / f"{ID}{LOCK_SUFFIX}"
    lock.touch()
    assert is_live(lock)

    os.utime(lock, (0, 0))

    with hold_lease(lock) as held:
        assert held.is_held()


def test_a_process_that_got_the_pid_of_a_dead_holder_is_not_taken_for_it(tmp_path: Path) -> None:
    lock = tmp_path / f"{ID}{LOCK_SUFFIX}"
    with hold_lease(lock):
        content = lock.read_text()
    started = content.split('"started": ')[1].rstrip("}")
    lock.write_text(content.replace(started, "1.0"))

    assert not is_live(lock)


def test_a_waiter_with_an_old_view_leaves_the_new_holders_lock_alone(tmp_path: Path) -> None:
    """It found a dead holder; before it could take over, another waiter did."""
    lock = tmp_path / f"{ID}{LOCK_SUFFIX}"
    dead: lease.Owner = {"token": "dead", "node": lease._node(), "pid": 1, "started": 0.0}
    with hold_lease(lock) as held:
        lease._discard_dead(Lease(lock, "late"), dead)

        assert held.is_held()


def test_a_writer_that_lost_its_lease_publishes_nothing(root: Path, recipe: Recipe) -> None:
    lock = address_in(root).beside(LOCK_SUFFIX)

    def build(workspace: Workspace) -> Draft:
        lock.write_text('{"token": "other", "node": "another machine", "pid": 1, "started": 0.0}')
        return fill(workspace)

    with pytest.raises(TryAgain, match="lost to another writer"):
        publish(root, recipe, build=build)

    assert published_ids(address_in(root).shelf) == []
    assert is_live(lock)


def test_a_failed_build_publishes_nothing_and_frees_the_lock(root: Path, recipe: Recipe) -> None:
    def build(workspace: Workspace) -> Draft:
        fill(workspace)
        raise ArtifactError("no")

    with pytest.raises(ArtifactError):
        publish(root, recipe, build=build)

    assert published_ids(address_in(root).shelf) == []
    assert not is_live(address_in(root).beside(LOCK_SUFFIX))


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

    with pytest.raises(ArtifactError, match=rf"1 there for other recipe settings: {ID}\). Make it with make it\."):
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
    """The damaged one may be the newest: an older one in its place would train on other data without a word."""
    publish(root, recipe, "a" * 16)
    newest, _ = publish(root, recipe, "b" * 16)
    (newest.path / MANIFEST).write_bytes(b"{")
    (newest.path.parent / CURRENT).unlink()

    with pytest.raises(ArtifactError, match=f"{newest.path.name}/{MANIFEST}: damaged"):
        find_artifact(root, "compile_cache", "small", recipe, CompileCacheManifest, "make")
