"""A damaged row of the corpus ends all workers at the step that uses the row; once it is restored the run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from services.common.artifacts.corpus import CorpusManifest, shard_path
from services.common.artifacts.corpus_rows import CorpusRows
from services.common.artifacts.store import Artifact
from services.trainer.data import sample_indices
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import call_trainer, checkpoints, read_run, state_hash, train_alone

BATCH, STEPS = 8, 9
OPTIONS = (f"--train.max_steps={STEPS}", "--train.evaluation_tokens=0", "--checkpoint.interval_steps=2")
"""Nine steps of two workers, which use most of the 80 rows. The save after step 6 waits for that after step 4."""


def row_first_used_by_rank_1(corpus: Artifact[CorpusManifest], step: int) -> int:
    """Return a row that this step is the first to use, and in it the second of two workers alone.

    A sample uses its row and the next one, for the last target.
    """
    samples = sample_indices(corpus.manifest.corpus.num_samples("train"), 0, 0, step * BATCH)
    *others, own = np.split(samples, 2 * step)
    used = np.concatenate(others)
    return next(int(row) for row in own if row not in {*used, *(used + 1)})


def flip_a_bit_of_row(corpus: Artifact[CorpusManifest], row: int) -> tuple[Path, bytes]:
    """Flip a bit of a row's ids. Return the path of the shard, and its content before."""
    path = corpus.path / shard_path("train", row // corpus.manifest.corpus.rows_per_shard)
    ids = CorpusRows(corpus.path, corpus.manifest.corpus).read("train", row).ids.tobytes()
    before = path.read_bytes()
    assert before.count(ids) == 1
    content = bytearray(before)
    content[before.index(ids) + len(ids) // 2] ^= 1
    path.write_bytes(content)
    return path, before


def test_a_row_that_one_worker_finds_damaged_ends_all_and_the_run_goes_on_once_it_is_restored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, straight = write_recipe(tmp_path), tmp_path / "straight"
    corpus = make_corpus(tmp_path / "fsx", make_recipe(tmp_path))
    make_corpus(straight, make_recipe(tmp_path))
    assert train_alone(capfd, recipe, straight, *OPTIONS)[0] == 0
    row = row_first_used_by_rank_1(corpus, step=7)
    shard, content = flip_a_bit_of_row(corpus, row)

    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx", *OPTIONS, "--launch=inline")

    assert exit_code == 3, output
    assert re.search(rf"{shard}.* row {row % 32} .* row {row} ", output)
    # The record of step 6 may be missing: worker 0 writes it while worker 1 already reads the rows of step 7.
    assert [each["step"] for each in read_run(tmp_path / "fsx").records] in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    newest = [*checkpoints(tmp_path / "fsx")][-1]
    assert newest >= "step-00000004"

    shard.write_bytes(content)
    assert call_trainer(capfd, recipe, tmp_path / "fsx", *OPTIONS, "--launch=inline")[0] == 0
    resumed = read_run(tmp_path / "fsx")
    assert resumed.starts[-1].endswith(newest)
    assert {each["step"]: each["loss"] for each in resumed.records} == dict(enumerate(read_run(straight).losses, 1))
    last = f"step-{STEPS:08d}"
    assert state_hash(checkpoints(tmp_path / "fsx")[last]) == state_hash(checkpoints(straight)[last])
