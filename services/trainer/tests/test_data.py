"""The order of samples is a function of the step alone, and of a corpus of any size only the rows in use are read."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.artifacts.corpus import SPLITS, CorpusManifest, shard_path
from services.common.artifacts.corpus_rows import MAX_MAPS, CorpusRows
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError
from services.common.program.mesh import Mesh
from services.common.testing.file_opens import noticing_opens
from services.common.testing.waiting import wait_until
from services.trainer.data import micro_batches, permute, sample_indices
from services.trainer.mixture import Mixture
from services.trainer.tests.builders import DOCUMENT_TOKENS, NewJob, make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import OF_A_RUN, call_trainer


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65_537])
def test_an_epoch_visits_every_sample_exactly_once(size: int) -> None:
    order = permute(np.arange(size), size, seed=1, epoch=0)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_epochs_and_seeds_have_different_orders_without_a_stride() -> None:
    size = 10_000
    orders = [permute(np.arange(size), size, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all((left != right).mean() > 0.99 for left in orders for right in orders if left is not right)
    steps = np.diff(orders[0])
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.05  # a random order's differences: exactly -1/2
    assert np.unique(steps).size > size / 4


def test_a_batch_may_straddle_two_epochs() -> None:
    first_epoch = permute(np.arange(10), 10, 0, 0)
    second_epoch = permute(np.arange(10), 10, 0, 1)
    assert sample_indices(10, seed=0, first=8, count=4).tolist() == [*first_epoch[8:], *second_epoch[:2]]


def test_any_number_of_workers_reads_the_same_global_batch(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path, recipe)
    stream = Mixture([TokenStream(corpus.path, corpus.manifest.corpus, "train")])
    for step in (0, 9, 10, 31):  # 80 samples in batches of 8: an epoch ends after step 9
        batches = [
            torch.cat([b.tokens for rank in range(w) for b in micro_batches(stream, recipe, step, Mesh(rank, w))])
            for w in (1, 2, 4)
        ]
        assert torch.equal(batches[0], batches[1])
        assert torch.equal(batches[0], batches[2])
        assert batches[0].shape == (8, 17)
        in_turns = [list(micro_batches(stream, recipe, step, Mesh(rank, 2, takes_turns=True))) for rank in range(2)]
        assert torch.equal(torch.cat([b.tokens for turn in zip(*in_turns, strict=True) for b in turn]), batches[0])


def test_positions_begin_again_at_each_document_where_the_recipe_says_so_and_at_each_row(tmp_path: Path) -> None:
    causal, recipe = make_recipe(tmp_path), make_recipe(tmp_path, train__attention_mask="block_causal")
    corpus = make_corpus(tmp_path, recipe)
    stream = TokenStream(corpus.path, corpus.manifest.corpus, "train")
    assert all(
        batch.positions is None for batch in micro_batches(Mixture([stream]), causal, 0, Mesh(0, data_parallel_size=1))
    )
    samples = sample_indices(stream.num_samples, recipe.train.seed, 8, 8)
    places = np.arange(16)
    expected = np.minimum((samples[:, None] * 16 + places) % DOCUMENT_TOKENS, places)

    batches = list(micro_batches(Mixture([stream]), recipe, 1, Mesh(0, data_parallel_size=1)))

    positions = [batch.positions for batch in batches if batch.positions is not None]
    assert torch.cat(positions).tolist() == expected.tolist()


ROWS = 130
"""Rows of each split, so that both splits together have more files than a reader maps."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    """Publish a corpus of 130 shards of a row in each split."""
    folder = tmp_path_factory.mktemp("corpus")
    return make_corpus(folder / "fsx", make_recipe(folder, corpus__rows_per_shard="1"), rows=ROWS)


def count_maps(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(folder) in line and line.endswith(".arrow") for line in lines)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps in Linux's /proc")
def test_streams_of_both_splits_share_at_most_256_maps(corpus: Artifact[CorpusManifest]) -> None:
    rows = CorpusRows(corpus.path, corpus.manifest.corpus)
    before, most = count_maps(corpus.path), 0
    for split in SPLITS:
        stream = TokenStream(corpus.path, corpus.manifest.corpus, split, rows)
        for sample in range(stream.num_padded_samples):
            stream.prefetch([sample])
            stream.read_documents([sample])
            if sample % 40 == 0 or sample == ROWS:
                most = max(most, count_maps(corpus.path) - before)

    assert most == MAX_MAPS == 256
    few = TokenStream(corpus.path, corpus.manifest.corpus, split, CorpusRows(corpus.path, corpus.manifest.corpus, 5))
    order = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(stream.read(order), few.read(order))


def test_a_stream_is_opened_without_any_of_its_files(corpus: Artifact[CorpusManifest], tmp_path: Path) -> None:
    stream = TokenStream(tmp_path, corpus.manifest.corpus, "train")

    stream.prefetch(range(ROWS))  # leaves damage to the read
    assert stream.num_samples == ROWS
    with pytest.raises(ArtifactError, match=r"shard-000007\.arrow"):
        stream.read([7])


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux's kernel")
def test_the_kernel_reads_the_rows_that_were_prefetched(tmp_path: Path) -> None:
    """The row lies 12 MB away from what is read to map the file, which is more than the kernel reads by itself."""
    sizes = {"corpus__sequence_length": "4096", "corpus__rows_per_shard": "3000"}
    corpus = make_corpus(tmp_path, make_recipe(tmp_path, **sizes), rows=3_000)
    path, at = corpus.path / shard_path("train", 0), 1_500 * 4096 * 2
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_in_memory(path, at):
        pytest.skip("this file system keeps its files in memory")
    stream = TokenStream(corpus.path, corpus.manifest.corpus, "train")

    stream.prefetch([2_998])
    assert not is_in_memory(path, at)  # what is read to map the file
    stream.prefetch([1_500])

    wait_until(lambda: is_in_memory(path, at), 30)


def is_in_memory(path: Path, at: int) -> bool:
    """Ask the kernel for the page of a byte of the file. `preadv` with RWF_NOWAIT would begin to read the page."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content, found = np.frombuffer(mapped, np.uint8), ctypes.create_string_buffer(1)
        address = content.ctypes.data + at // mmap.PAGESIZE * mmap.PAGESIZE
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), found) == 0
        del content
        return bool(found.raw[0] & 1)


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
        if command == "train":
            options = ("--launch=inline", *options)
        if command not in OF_A_RUN:
            options = (*OPTIONS, *options)
        with noticing_opens(corpus) as opens:
            exit_code, output = call_trainer(capfd, place / "small.toml", place / "fsx", *options, command=command)
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


def test_a_worker_gets_the_same_bytes_for_a_corpus_of_any_number_of_shards(new_job: NewJob) -> None:
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
    opened = opens_of(command, *options)
    assert MANIFEST in opened
    assert {path.split("/")[0] + "/" for path in opened - {MANIFEST}} == ({read} if read else set())
