"""`python -m services.common.artifacts` verifies, shows, lists and cleans up artifacts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts import lease
from services.common.artifacts.__main__ import main
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.lease import ChangeWatch, find_idle, hold_lease
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import (
    CURRENT,
    LOCK_SUFFIX,
    PARTIAL_SUFFIX,
    SCRATCH_SUFFIX,
    Address,
    Draft,
    Workspace,
    find_artifact,
)
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Recipe, fingerprint
from services.common.testing.artifacts import ID, address_in, fill, publish, publish_checkpoint
from services.common.testing.file_opens import noticing_opens
from services.common.testing.fork_server import start_process
from services.common.testing.manifests import Fields, reseal
from services.common.testing.recipes import make_recipe
from services.common.testing.waiting import wait_until
from services.common.tests.builders import REPOSITORY, publish_slowly, write_foreign_lock

SHORT_LEASE_SECONDS = 0.3
TOKEN = "0123456789abcdef0123456789abcdef"
RUN = "run-01234567"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fsx"


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", SHORT_LEASE_SECONDS)


def run(*arguments: str | Path) -> int:
    return exit_code_of(lambda: main([str(argument) for argument in arguments]))


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "file").touch()
    return path


def publish_a_superseded_one(root: Path, recipe: Recipe) -> Path:
    """Publish two artifacts of one recipe and return the first; `current.json` names the second."""
    superseded, _ = publish(root, recipe, "a" * 16)
    publish(root, recipe, "b" * 16)
    return superseded.path


def test_the_command_runs_as_a_module(root: Path, recipe: Recipe) -> None:
    publish(root, recipe)

    command = [sys.executable, "-m", "services.common.artifacts", "verify", str(root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"ok       {address_in(root).path}  compile_cache/1  3 files, 602 bytes")


def test_verify_ends_with_3_and_names_what_is_damaged(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = publish(root, recipe, "a" * 16)
    torn, _ = publish(root, recipe, "b" * 16)
    (torn.path / "three.json").write_bytes(b"[]")

    assert run("verify", root) == 3

    printed = capsys.readouterr()
    assert f"ok       {whole.path}" in printed.out
    assert f"DAMAGED  {torn.path}" in printed.out
    assert "three.json: xxh3-128 is" in printed.err


def in_cache(**changes: Any) -> Callable[[Fields], object]:
    """Return a change of the payload that also makes the program fingerprint fit."""

    def change(fields: Fields) -> None:
        cache = fields["compile_cache"]
        cache.update(changes)
        cache["program_fingerprint"] = fingerprint(cache["facts"])

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields["compile_cache"]["facts"].update(torch="9.9"), "facts hash to "),
        (lambda fields: fields["compile_cache"].update(program_fingerprint="0" * 64), "is 000000000000"),
        (in_cache(facts={"torch": "none"}), "the identity of its facts' recipe: "),
        (in_cache(facts={"recipe": {"model.hidden_size": 1}}), "the identity of its facts' recipe: "),
        (in_cache(target="cuda"), "target: cuda, expected cpu"),
        (in_cache(world_size_traced=7), "world_size_traced: 7, expected 1"),
        (lambda fields: fields.update(files=fields["files"][-1:]), "whether it has files of graphs: False"),
    ],
)
def test_verify_holds_a_compile_cache_against_its_facts_and_its_recipe(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str], change: Callable[[Fields], object], said: str
) -> None:
    artifact, _ = publish(root, recipe)
    assert run("verify", root) == 0
    reseal(artifact.path, change)

    assert run("verify", root) == 3

    assert said in capsys.readouterr().err


def test_verify_where_nothing_is_published_ends_with_3(tmp_path: Path) -> None:
    assert run("verify", tmp_path) == 3


def test_a_folder_that_does_not_exist_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", tmp_path / "nowhere") == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_show_prints_the_manifest_without_the_file_list(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, _ = publish(root, recipe)

    assert run("show", artifact.path) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["files"] == "3 files, 602 bytes"
    assert shown["content_digest"] == artifact.manifest.content_digest
    assert shown["recipe"]["name"] == "small"


def test_an_artifact_of_an_unknown_kind_ends_with_3(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, _ = publish(root, recipe)
    reseal(artifact.path, lambda fields: fields.update(schema="song/1"))

    assert run("show", artifact.path) == 3
    assert "schema 'song/1', this program reads corpus/4, compile_cache/1, checkpoint/4" in capsys.readouterr().err


def test_list_shows_what_is_published_and_nothing_else(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, _ = publish(root, recipe)
    partial = make_folder(artifact.path.with_name(f"{'f' * 16}.01234567{PARTIAL_SUFFIX}"))
    (partial / MANIFEST).write_bytes((artifact.path / MANIFEST).read_bytes())

    assert run("list", root) == 0

    (line,) = capsys.readouterr().out.splitlines()
    assert "compile_cache/1" in line
    assert line.endswith(str(artifact.path))


def test_list_shows_what_is_whole_beside_a_damaged_manifest(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = publish(root, recipe, "a" * 16)
    torn, _ = publish(root, recipe, "b" * 16)
    (torn.path / MANIFEST).write_bytes(b"{")

    assert run("list", root) == 3

    printed = capsys.readouterr()
    assert printed.out.strip().endswith(str(whole.path))
    assert str(torn.path) in printed.err


def test_gc_removes_what_dead_writers_left(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    collection, dead = artifact.path.parent, "d" * 16
    folders = [
        make_folder(collection / f"{dead}{PARTIAL_SUFFIX}"),
        make_folder(collection / f"{dead}.01234567{PARTIAL_SUFFIX}"),
        make_folder(collection / f"{ID}.displaced-01234567{PARTIAL_SUFFIX}"),
        make_folder(collection / f"{ID}.removed-01234567{PARTIAL_SUFFIX}"),
        make_folder(collection / f"{dead}{SCRATCH_SUFFIX}"),
        make_folder(root / "checkpoint" / RUN / f"step-00000005.01234567{PARTIAL_SUFFIX}"),
    ]
    files = [
        collection / f"{dead}{LOCK_SUFFIX}",
        root / "run" / f"{RUN}{LOCK_SUFFIX}",
        collection / ".current.json.123.tmp",
        collection / f".{dead}{LOCK_SUFFIX}.{TOKEN}",
        collection / f".{dead}{LOCK_SUFFIX}.dead-{TOKEN}",
        root / "run" / f".{RUN}{LOCK_SUFFIX}.released-{TOKEN}",
    ]
    for path in files:
        write_foreign_lock(path)
    left = folders + files

    assert run("gc", root) == 0

    assert [path for path in left if path.exists()] == []
    assert sorted(path.name for path in collection.iterdir()) == [ID, CURRENT]


def between_looks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another machine do something in each pause of `gc`, however long a look takes."""
    sleep = time.sleep

    def act_and_sleep(seconds: float) -> None:
        act()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", act_and_sleep)


def test_gc_watches_locks_of_other_machines_and_all_at_once(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times in the locks are ignored: the clock of the other machine may be slow by days."""
    collection = publish(root, recipe)[0].path.parent
    identifiers = [f"{number:016x}" for number in range(20)]
    for identifier in identifiers:
        make_folder(collection / f"{identifier}{SCRATCH_SUFFIX}")
        write_foreign_lock(collection / f"{identifier}{LOCK_SUFFIX}")
        os.utime(collection / f"{identifier}{LOCK_SUFFIX}", (0, 0))
    alive = collection / f"{identifiers[7]}{LOCK_SUFFIX}"
    beats = itertools.count(1)

    def beat() -> None:
        write_foreign_lock(alive.with_name("new"), next(beats))
        os.utime(alive.with_name("new"), (0, 0))
        alive.with_name("new").replace(alive)

    between_looks(monkeypatch, beat)
    assert run("gc", root) == 0

    assert sorted(path.name for path in collection.iterdir()) == sorted(
        [ID, CURRENT, alive.name, f"{identifiers[7]}{SCRATCH_SUFFIX}"]
    )
    assert capsys.readouterr().out.count("watching 20 locks and folders") == 1


def test_gc_does_not_wait_for_writers_that_are_known_to_be_dead(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 10.0**6)
    writer = start_process(publish_slowly, root, recipe, "killed")
    wait_until((root.parent / "killed.building").exists)
    writer.kill()
    writer.join()

    assert run("gc", root) == 0

    assert list(address_in(root).collection.iterdir()) == []


@pytest.mark.parametrize("is_alive", [False, True])
def test_gc_takes_a_checkpoint_whose_removal_was_interrupted(
    root: Path, is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal begins with the manifest. A folder that still changes may be a copy in progress."""
    collection = root / "checkpoint" / RUN
    headless = make_folder(collection / "step-00000005")
    renamed = make_folder(collection / "step-00000005.mine")
    if is_alive:
        between_looks(monkeypatch, lambda: (headless / "file").write_text(str(time.monotonic_ns())))
    assert run("gc", root) == 0

    assert headless.exists() == is_alive
    assert renamed.exists()


def test_gc_keeps_an_artifact_whose_copy_was_completed_while_it_watched(
    root: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, _ = publish(root, recipe)
    manifest = (artifact.path / MANIFEST).rename(root / "on-its-way")

    def complete_the_copy(watches: Iterable[ChangeWatch], tell: Callable[[int, float], None]) -> list[ChangeWatch]:
        idle = find_idle(watches, tell)
        manifest.rename(artifact.path / MANIFEST)
        return idle

    monkeypatch.setattr("services.common.artifacts.__main__.find_idle", complete_the_copy)
    assert run("gc", root) == 0

    assert run("verify", artifact.path) == 0


def test_gc_leaves_alone_what_has_a_name_that_no_stage_gives(root: Path, recipe: Recipe) -> None:
    artifact, _ = publish(root, recipe)
    collection = artifact.path.parent
    shutil.copytree(artifact.path, collection / "mine.partial")
    kept = [
        collection / "mine.partial",
        make_folder(collection / "experiment.scratch"),
        make_folder(root / "run" / "old.partial"),
    ]
    for name in ("notes.lock", ".mine.tmp"):
        (collection / name).write_text("mine")
        kept.append(collection / name)
    publish(root, recipe, "b" * 16)

    assert run("gc", root, "--unreferenced", "--yes") == 0

    assert [path for path in kept if not path.exists()] == []


@pytest.mark.parametrize(
    "name", ["x.partial", "a.lock", "b.scratch", "0123456789abcdef.partial", "compile_cache", "run"]
)
def test_an_artifact_is_seen_whatever_its_recipe_is_called(
    tmp_path: Path, root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path, name=f'"{name}"')
    addresses = [Address(root, "compile_cache", name, identifier) for identifier in ("a" * 16, "b" * 16)]
    for address in addresses:
        publish(root, recipe, address.id)
    left = make_folder(addresses[0].beside(PARTIAL_SUFFIX))

    for command in ("list", "verify"):
        assert run(command, root) == 0
        printed = capsys.readouterr().out
        assert [str(address.path) in printed for address in addresses] == [True, True]
    assert find_artifact(root, "compile_cache", name, recipe, CompileCacheManifest, "make").path == addresses[1].path
    assert run("gc", root, "--unreferenced", "--yes") == 0
    assert not left.exists()
    assert not addresses[0].path.exists()
    assert addresses[1].path.exists()


def test_gc_leaves_alone_what_a_live_lease_holds(root: Path, recipe: Recipe) -> None:
    seen = []

    def build(workspace: Workspace) -> Draft:
        draft = fill(workspace)
        (workspace.scratch / "work").touch()
        assert run("gc", root) == 0
        assert run("gc", root, "--unreferenced", "--yes") == 0
        seen.append((workspace.scratch / "work").exists())
        return draft

    _, is_new = publish(root, recipe, build=build)

    assert is_new
    assert seen == [True]


def test_gc_leaves_alone_the_checkpoint_that_a_live_run_is_writing(root: Path) -> None:
    partial = make_folder(root / "checkpoint" / RUN / f"step-00000005.01234567{PARTIAL_SUFFIX}")
    with hold_lease(root / "run" / f"{RUN}{LOCK_SUFFIX}"):
        run("gc", root)

        assert (partial / "file").exists()


def test_gc_leaves_alone_what_is_inside_of_an_artifact(root: Path, recipe: Recipe) -> None:
    """Compilers keep lock files in their caches."""
    files = {f"graphs/locks/one{LOCK_SUFFIX}": b"", f"graphs/two{PARTIAL_SUFFIX}/three": b""}
    artifact, _ = publish(root, recipe, build=lambda workspace: fill(workspace, files))
    for name in files:
        os.utime(artifact.path / name, (0, 0))

    run("gc", root)

    assert run("verify", root) == 0


def test_gc_refuses_a_folder_that_is_no_root(tmp_path: Path) -> None:
    write_foreign_lock(tmp_path / f"poetry{LOCK_SUFFIX}")

    assert run("gc", tmp_path) == 2
    assert (tmp_path / f"poetry{LOCK_SUFFIX}").exists()


def test_gc_keeps_published_artifacts_unless_it_is_asked(root: Path, recipe: Recipe) -> None:
    superseded = publish_a_superseded_one(root, recipe)

    run("gc", root)

    assert (superseded / MANIFEST).exists()


def test_gc_of_the_unreferenced_first_shows_what_it_would_remove(
    root: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    superseded = publish_a_superseded_one(root, recipe)

    assert run("gc", root, "--unreferenced") == 0

    assert f"would remove {superseded}\n" in capsys.readouterr().out
    assert (superseded / MANIFEST).exists()


def test_gc_of_the_unreferenced_keeps_what_current_json_names(root: Path, recipe: Recipe) -> None:
    superseded = publish_a_superseded_one(root, recipe)

    assert run("gc", root, "--unreferenced", "--yes") == 0

    assert not superseded.exists()
    assert (superseded.with_name("b" * 16) / MANIFEST).exists()


def test_gc_keeps_what_another_manifest_is_made_from(root: Path, recipe: Recipe) -> None:
    superseded, _ = publish(root, recipe, "a" * 16)
    link = superseded.manifest.link(superseded.path)
    publish(root, recipe, "b" * 16, build=lambda workspace: fill(workspace, inputs=(link,)))

    run("gc", root, "--unreferenced", "--yes")

    assert superseded.path.exists()


def test_gc_keeps_what_a_run_uses(root: Path, recipe: Recipe) -> None:
    superseded = publish_a_superseded_one(root, recipe)
    run_file = make_folder(root / "run" / "run-1") / "run.json"
    run_file.write_text(json.dumps({"artifacts": {"compile_cache": superseded.name}}), encoding="utf-8")

    run("gc", root, "--unreferenced", "--yes")

    assert superseded.exists()


def test_gc_keeps_an_artifact_that_a_stage_holds(root: Path, recipe: Recipe) -> None:
    superseded = publish_a_superseded_one(root, recipe)
    with hold_lease(superseded.with_name(superseded.name + LOCK_SUFFIX)):
        run("gc", root, "--unreferenced", "--yes")

        assert superseded.exists()


@pytest.mark.parametrize(
    ("damaged", "content"), [("manifest", b"{"), ("run.json", b"{"), ("run.json", b'{"artifacts": {"corpus": []}}')]
)
def test_gc_removes_nothing_while_it_cannot_tell_what_is_referred_to(
    root: Path, recipe: Recipe, damaged: str, content: bytes
) -> None:
    superseded = publish_a_superseded_one(root, recipe)
    run_file = make_folder(root / "run" / "run-1") / "run.json"
    run_file.write_text('{"artifacts": {}}', encoding="utf-8")
    torn = run_file if damaged == "run.json" else superseded.with_name("b" * 16) / MANIFEST
    torn.write_bytes(content)

    assert run("gc", root, "--unreferenced", "--yes") == 3

    assert superseded.exists()


@pytest.mark.parametrize("command", [("list",), ("gc", "--unreferenced", "--yes")])
def test_a_manifest_is_read_once(root: Path, recipe: Recipe, command: tuple[str, ...]) -> None:
    """A manifest lists thousands of files, and a root has thousands of manifests."""
    superseded = publish_a_superseded_one(root, recipe)

    with noticing_opens(root) as opens:
        assert run(*command, root) == 0

    assert Counter(path for path in opens.paths if path.name == MANIFEST) == {
        superseded / MANIFEST: 1,
        superseded.with_name("b" * 16) / MANIFEST: 1,
    }


def test_gc_keeps_checkpoints(root: Path, recipe: Recipe) -> None:
    checkpoint = publish_checkpoint(root, recipe, step=5)
    (checkpoint.path.parent / CURRENT).unlink()

    run("gc", root, "--unreferenced", "--yes")

    assert run("verify", checkpoint.path) == 0
