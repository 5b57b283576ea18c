"""After a kill, a lost node or a full disk, the same command gives the corpus of an undisturbed run."""

from __future__ import annotations

import fnmatch
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.common import source_code
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import find_artifact
from services.common.recipe.file import load_recipe
from services.common.testing.disks import mounted, remount
from services.common.testing.ray_clusters import joining, running_cluster
from services.common.testing.seeds import draw_seed
from services.common.testing.waiting import wait_until
from services.tokenizer.corpus_inputs import CONTENT_VERSION
from services.tokenizer.tests.builders import (
    is_anything_published,
    make_documents,
    make_text,
    publish,
    published,
    run,
    start,
    stop,
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
    [vocabulary] = root.rglob("*.scratch/vocabulary/*")
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


def test_a_corpus_says_that_the_code_has_changed_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever edits the stage and forgets CONTENT_VERSION is told; another docstring or import is no change."""
    recipe, root = write_recipe(tmp_path, write_documents(tmp_path / "text", make_documents(20))), tmp_path / "fsx"
    made = publish(recipe, root).manifest
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    for package in ("services/tokenizer", "services/common"):
        shutil.copytree(source_code.ROOT / package, tmp_path / "code" / package, ignore=ignored)
    monkeypatch.setattr(source_code, "ROOT", tmp_path / "code")
    edited = tmp_path / "code/services/tokenizer/text_batch.py"
    for old, new, is_told in (
        ("", "", False),
        ('"""Batches of', '"""Some batches of', False),
        ("import numpy.typing as npt\n", "import numpy.typing as npt\nimport os\n", False),
        ("BATCH_BYTES = 4 *", "BATCH_BYTES = 5 *", True),
    ):
        edited.write_text(edited.read_text().replace(old, new, 1))
        capsys.readouterr()
        assert run(recipe, root) == 0
        printed = capsys.readouterr().out
        assert "already published" in printed
        told = [line for line in printed.splitlines() if "CONTENT_VERSION" in line or "code has changed" in line]
        assert bool(told) == is_told
    assert made.producer.version in told[0]
    assert made.producer.git_sha[:12] in told[0]
    assert str(CONTENT_VERSION) in told[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


@pytest.mark.parametrize(("size", "phase"), [("200k", "encode"), ("3m", "pack")])
def test_a_full_disk_stops_the_stage_and_space_lets_it_finish(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], size: str, phase: str
) -> None:
    """The corpus has 2.2 MB of tokens, in token files and then in shards."""
    text = write_documents(tmp_path / "text", [make_text(300_000, seed=seed) for seed in range(7)])
    recipe = write_recipe(
        tmp_path, text, corpus__split_bytes=300_000, corpus__rows_per_shard=10_000, tokenizer__num_workers=1
    )
    remount(small_disk, f"size={size}")

    assert run(recipe, small_disk / "fsx") == 5

    assert str(small_disk) in capsys.readouterr().err
    assert not is_anything_published(small_disk / "fsx")
    assert not list(small_disk.rglob("*.tmp"))
    assert any(small_disk.rglob("*.partial/train")) == (phase == "pack")

    remount(small_disk, "size=64m")
    assert run(recipe, small_disk / "fsx") == 0
    assert run(recipe, tmp_path / "undisturbed") == 0
    expected = published(tmp_path / "undisturbed").manifest.content_digest
    assert published(small_disk / "fsx").manifest.content_digest == expected


def test_a_read_only_root_is_named(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", [make_text(10_000)]))
    remount(small_disk, "ro")

    assert run(recipe, small_disk / "fsx") == 5

    assert str(small_disk) in capsys.readouterr().err


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of the tokenizer. Ray takes this process to be on the first one."""
    pytest.importorskip("ray")
    node = {"num_cpus": 2, "resources": {"stage_tokenizer": 1}}
    with running_cluster([node, node]) as started, joining(started):
        yield started


class Watch(threading.Thread):
    """Removes a node when some partitions are encoded, and notes whether a finished one is ever encoded again."""

    def __init__(self, root: Path, cluster: Any) -> None:
        super().__init__()
        self._root, self._cluster = root, cluster
        self.is_over = threading.Event()
        self.finished_before = 0
        self.encoded_again: set[str] = set()

    def run(self) -> None:
        inodes: dict[str, int] = {}
        while not self.is_over.wait(0.02):
            for path in self._root.glob("corpus/*/*.scratch/*/0*/*[0-9].json"):
                try:
                    inode = path.stat().st_ino
                except FileNotFoundError:  # the corpus was published, and scratch is removed
                    continue
                if inodes.setdefault(path.name, inode) != inode:
                    self.encoded_again.add(path.name)
            if len(inodes) >= 6 and not self.finished_before:
                self.finished_before = len(inodes)
                self._cluster.remove_node(self._cluster.worker_nodes.copy().pop(), allow_graceful=False)


@pytest.mark.slow
def test_a_node_that_is_lost_costs_its_unfinished_partitions_alone(tmp_path: Path, cluster: Any) -> None:
    text = write_documents(tmp_path / "text", [make_text(300_000, seed=seed) for seed in range(40)])
    recipe = write_recipe(
        tmp_path, text, corpus__split_bytes=300_000, corpus__rows_per_shard=5_000, tokenizer__num_workers=4
    )
    watch = Watch(tmp_path / "fsx", cluster)
    watch.start()
    try:
        assert run(recipe, tmp_path / "fsx", "--launch=ray") == 0
    finally:
        watch.is_over.set()
        watch.join()

    assert 6 <= watch.finished_before < 40
    assert not watch.encoded_again
    assert run(recipe, tmp_path / "alone", "--tokenizer.num_workers=1") == 0
    made = [published(tmp_path / name).manifest for name in ("fsx", "alone")]
    assert made[0].content_digest == made[1].content_digest
