"""A command opens the manifest of a corpus, and of the corpus's files only those whose rows it uses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.artifacts.corpus import shard_path
from services.common.artifacts.manifest import MANIFEST
from services.common.testing.file_opens import noticing_opens
from services.trainer.data import sample_indices
from services.trainer.job import Job
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import call_trainer

BATCH, ROWS_PER_SHARD = 8, 2
OPTIONS = (
    *(f"--corpus.rows_per_shard={ROWS_PER_SHARD}", "--train.evaluation_tokens=0"),
    "--parallel.data_parallel_size=1",
)

Opens = Callable[..., set[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a corpus of 80 rows in 40 shards, on which the tests of this module train in turn."""
    folder = tmp_path_factory.mktemp("start")
    write_recipe(folder)
    make_corpus(folder / "fsx", make_recipe(folder, corpus__rows_per_shard=str(ROWS_PER_SHARD)))
    return folder


@pytest.fixture
def opens_of(place: Path, capfd: pytest.CaptureFixture[str]) -> Opens:
    """Run a command that succeeds, and return the corpus's files that it opened."""
    [corpus] = place.glob("fsx/corpus/*/*/")

    def run(command: str, *options: str) -> set[str]:
        launch = ("--launch=inline",) if command == "train" else ()
        with noticing_opens(corpus) as opens:
            exit_code, output = call_trainer(
                capfd, place / "small.toml", place / "fsx", *launch, *OPTIONS, *options, command=command
            )
        assert exit_code == 0, output
        return {path.relative_to(corpus).as_posix() for path in opens.paths}

    return run


def test_a_start_and_a_resume_open_the_shards_of_their_own_steps_alone(opens_of: Opens) -> None:
    for step in (1, 2):
        # The rows of the samples of the step and of the next one, which are prefetched, and the rows after these.
        samples = sample_indices(80, 0, (step - 1) * BATCH, 2 * BATCH)
        rows = {row for row in (*samples, *(samples + 1)) if row < 80}
        shards = {shard_path("train", int(row) // ROWS_PER_SHARD) for row in rows}
        assert len(shards) < 40
        assert opens_of("train", f"--train.max_steps={step}") - {"train/tail/tail.arrow"} == {MANIFEST, *shards}
    assert opens_of("train", "--train.max_steps=2") == {MANIFEST}


def test_a_worker_gets_the_same_bytes_for_a_corpus_of_any_number_of_shards(new_job: Callable[..., Job]) -> None:
    few, many = new_job("few", corpus__rows_per_shard="9"), new_job("many", corpus__rows_per_shard="1")

    assert many.corpus.payload.num_shards("train") - few.corpus.payload.num_shards("train") == 71
    assert abs(len(pickle.dumps(many)) - len(pickle.dumps(few))) < 71


@pytest.mark.parametrize(
    ("command", "options", "read"),
    [
        ("plan", (), ""),
        ("doctor", ("--quick",), ""),
        ("report", (), ""),
        ("inspect-checkpoint", (), ""),
        ("sample", ("--prompt=a", "--tokens=1"), "tokenizer/"),
        ("evaluate", ("--tokens=16",), "validation/"),
    ],
)
def test_other_commands_open_no_shard_that_they_do_not_use(
    opens_of: Opens, command: str, options: tuple[str, ...], read: str
) -> None:
    opens_of("train", "--train.max_steps=2")
    opened = opens_of(command, "--train.max_steps=2", *options)
    assert MANIFEST in opened
    assert {path.split("/")[0] + "/" for path in opened - {MANIFEST}} == ({read} if read else set())
