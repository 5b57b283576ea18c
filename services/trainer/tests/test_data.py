"""Sample order: every sample once an epoch, the same for any number of workers, a function of the step alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.artifacts.token_stream import TokenStream
from services.common.program.mesh import Mesh
from services.trainer.data import micro_batches, permute, sample_indices
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_recipe


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
    stream = TokenStream(corpus.path, corpus.manifest.corpus, "train")
    for step in (0, 9, 10, 31):  # 80 samples in batches of 8: an epoch ends after step 9
        batches = [
            torch.cat([b.tokens for rank in range(w) for b in micro_batches(stream, recipe, step, Mesh(rank, w))])
            for w in (1, 2, 4)
        ]
        assert torch.equal(batches[0], batches[1])
        assert torch.equal(batches[0], batches[2])
        assert batches[0].shape == (8, 17)


def test_positions_begin_again_at_each_document_where_the_recipe_says_so_and_at_each_row(tmp_path: Path) -> None:
    causal, recipe = make_recipe(tmp_path), make_recipe(tmp_path, train__attention_mask="block_causal")
    corpus = make_corpus(tmp_path, recipe)
    stream = TokenStream(corpus.path, corpus.manifest.corpus, "train")
    assert all(batch.positions is None for batch in micro_batches(stream, causal, 0, Mesh(0, data_parallel_size=1)))
    samples = sample_indices(stream.num_samples, recipe.train.seed, 8, 8)
    places = np.arange(16)
    expected = np.minimum((samples[:, None] * 16 + places) % DOCUMENT_TOKENS, places)

    batches = list(micro_batches(stream, recipe, 1, Mesh(0, data_parallel_size=1)))

    positions = [batch.positions for batch in batches if batch.positions is not None]
    assert torch.cat(positions).tolist() == expected.tolist()
