"""The same command after any crash gives the corpus of an undisturbed run."""

from __future__ import annotations

import fnmatch
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import find_artifact
from services.common.errors import TryAgain
from services.common.recipe.file import load_recipe
from services.common.testing.seeds import draw_seed
from services.common.testing.waiting import wait_until
from services.tokenizer.tests.builders import (
    is_anything_published,
    make_documents,
    make_text,
    publish,
    published,
    run,
    start,
    write_documents,
    write_recipe,
)

ALONE = "--tokenizer.num_workers=1"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("text"), make_documents(600, mean_bytes=1_500))


@pytest.fixture
def recipe(tmp_path: Path, text: Path) -> Path:
    return recipe_over(text, tmp_path)


def recipe_over(text: Path, folder: Path) -> Path:
    """Write the recipe of a corpus of 900 kB in 12 partitions."""
    return write_recipe(
        folder,
        text,
        corpus__validation_fraction=0.1,
        corpus__split_bytes=80_000,
        corpus__rows_per_shard=1_000,
        tokenizer__num_workers=2,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> str:
    """Return the content digest of the corpus that one command makes without a crash."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(recipe_over(text, folder), folder / "fsx", ALONE) == 0
    return published(folder / "fsx").manifest.content_digest


def find_files(root: Path, pattern: str) -> list[Path]:
    """Find files below a folder. Unlike `rglob`, this works while other processes remove folders."""
    return [Path(folder) / name for folder, _, files in os.walk(root) for name in fnmatch.filter(files, pattern)]


def kill_when(condition: Callable[[], object], process: subprocess.Popen[str]) -> bool:
    """Kill the stage and its processes as soon as the condition holds. Return whether the stage was still running."""
    wait_until(lambda: condition() or process.poll() is not None)
    was_running = process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return was_running


def test_kill_at_every_stage_then_the_same_command_gives_the_same_corpus(
    tmp_path: Path, recipe: Path, undisturbed: str
) -> None:
    root = tmp_path / "fsx"
    milestones = ["plan.json", "000007.json", "shard-000001.arrow"]

    killed = []
    for milestone in milestones:
        process = start(recipe, root)
        killed.append(kill_when(lambda name=milestone: find_files(root, name), process))  # type: ignore[misc]
        if is_anything_published(root):  # the last kill may come after the commit
            assert published(root).manifest.content_digest == undisturbed

    assert sum(killed) >= 2, killed
    assert run(recipe, root, ALONE) == 0
    assert published(root).manifest.content_digest == undisturbed
    left = {path.name for path in published(root).path.parent.iterdir()}
    assert left <= {published(root).path.name, "current.json"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launch", ["inline", "ray"])
def test_twenty_kills_at_random_moments_give_the_same_corpus(
    tmp_path: Path, recipe: Path, undisturbed: str, launch: str
) -> None:
    """A kill comes at a random time after the stage has written its plan, and the next run continues."""
    chosen = random.Random(draw_seed())
    root = tmp_path / "fsx"
    for _ in range(20):
        process = start(recipe, root, launch=launch)
        wait_until(lambda: find_files(root, "plan.json") or is_anything_published(root), process=process)
        moment = time.monotonic() + chosen.uniform(0, 4 if launch == "inline" else 8)
        kill_when(lambda at=moment: time.monotonic() > at, process)  # type: ignore[misc]
        if is_anything_published(root):
            shutil.rmtree(root)
    assert run(recipe, root, ALONE) == 0
    assert published(root).manifest.content_digest == undisturbed


def stop(*arguments: object) -> None:
    raise TryAgain("stopped after all partitions were encoded")


def test_what_is_finished_is_not_made_again_and_what_is_damaged_is(
    tmp_path: Path, recipe: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "fsx"
    with monkeypatch.context() as patch:
        patch.setattr("services.tokenizer.build.pack_splits", stop)
        assert run(recipe, root, ALONE) == 75
    done = sorted(root.rglob("00000[0-9].json"))
    before = {path.name: path.stat().st_ino for path in done}
    damaged = done[0].with_suffix(".train.tokens")
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    [vocabulary] = root.rglob("*.scratch/vocabulary")
    vocabulary.write_bytes(vocabulary.read_bytes()[:-1])
    torn = damaged.with_name(".000011.train.tokens.0123.tmp")
    torn.write_bytes(b"left by a killed writer")

    with monkeypatch.context() as patch:
        patch.setattr("services.tokenizer.build.pack_splits", stop)
        assert run(recipe, root, ALONE) == 75

    after = {path.name: path.stat().st_ino for path in root.rglob("00000[0-9].json") if path.name in before}
    assert not torn.exists()
    assert [name for name in before if before[name] != after[name]] == [done[0].name]
    assert run(recipe, root, ALONE) == 0
    assert published(root).manifest.content_digest == undisturbed


def test_of_two_writers_one_builds_and_both_succeed(tmp_path: Path, recipe: Path) -> None:
    writers = [start(recipe, tmp_path / "fsx", ALONE) for _ in range(2)]
    outputs = [writer.communicate(timeout=120)[0] for writer in writers]

    assert [writer.returncode for writer in writers] == [0, 0]
    assert sorted(output.split("  ")[0] for output in outputs) == ["already published", "published"]
    assert published(tmp_path / "fsx").manifest.corpus.documents_read == 600


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("long"), [make_text(500_000, seed=index) for index in range(12)])


@pytest.mark.parametrize(
    ("milestone", "number", "exit_code"),
    [
        ("plan.json", signal.SIGINT, 130),
        ("000000.json", signal.SIGTERM, 75),
    ],
)
def test_a_stopped_stage_says_so_and_publishes_nothing(
    tmp_path: Path, long_text: Path, number: signal.Signals, exit_code: int, milestone: str
) -> None:
    """The signal comes after the plan is written, or while workers encode."""
    recipe = write_recipe(
        tmp_path, long_text, corpus__split_bytes=1, tokenizer__train__max_bytes=6_000_000, tokenizer__num_workers=2
    )
    process = start(recipe, tmp_path / "fsx")
    wait_until(lambda: find_files(tmp_path / "fsx", milestone), process=process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == exit_code, errors
    assert "Traceback" not in errors
    assert not is_anything_published(tmp_path / "fsx")


def test_a_second_run_finds_the_corpus_and_a_changed_input_makes_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_documents(tmp_path / "text", make_documents(40))
    recipe, root = write_recipe(tmp_path, text), tmp_path / "fsx"
    first = publish(recipe, root)
    assert capsys.readouterr().out.startswith(f"published  {first.path}\n")
    assert run(recipe, root) == 0
    assert capsys.readouterr().out.startswith(f"already published  {first.path}\n")

    (text / "00007.txt").write_bytes(b"other text")
    assert run(recipe, root) == 0
    assert capsys.readouterr().out.startswith("published  ")
    shutil.rmtree(first.path)
    assert published(root).manifest.inputs != first.manifest.inputs
    found = find_artifact(root, "corpus", "test", load_recipe(recipe), CorpusManifest, made_by="")
    assert found.path == published(root).path
