"""Draws a run's samples from its corpora: a pure function of the sample's number, with the weights' shares.

For weights w[k] with the sum W, the first n samples of a run have n w[k] / W of corpus k, less than one more or fewer,
for every n, and exactly so for multiples of W; those of a branch less than two. A corpus's samples run through its own
shuffled epochs, as in a run on it alone. It costs a run its manifest, and the rows that are taken of it; all together
map at most `MAX_MAPS` files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Split
from services.common.artifacts.corpus_rows import MAX_MAPS, CorpusRows, Row
from services.common.artifacts.token_stream import Samples, TokenStream
from services.trainer.data import sample_indices
from services.trainer.job import RunCorpus


@cache
def order_corpora(weights: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the number of the corpus of each sample in a period of W samples.

    The bound holds exactly if sample j of corpus k is in a place from floor(j W / w[k]) to ceil((j + 1) W / w[k]) - 1.
    Taking the sample whose last place comes first finds such a place for each (Baruah et al., Proportionate progress,
    Algorithmica 15, 1996; Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980).
    """
    total, taken = sum(weights), [0] * len(weights)
    order = np.empty(total, dtype=np.int64)
    for place in range(total):
        _, chosen = min(
            (-(-(taken[k] + 1) * total // weight), k)
            for k, weight in enumerate(weights)
            if taken[k] * total < (place + 1) * weight
        )
        order[place] = chosen
        taken[chosen] += 1
    return order


def count_taken(weights: Sequence[int], number: int) -> npt.NDArray[np.int64]:
    """Return how many of a run's first `number` samples come from each corpus."""
    periods, rest = divmod(number, sum(weights))
    return periods * np.array(weights) + np.bincount(order_corpora(tuple(weights))[:rest], minlength=len(weights))


class Mixture(Samples):
    """The samples of a split of a run's corpora. Those of a corpus have consecutive indices, after the one before."""

    def __init__(self, streams: list[TokenStream], weights: Iterable[int] = (1,), starts: Iterable[int] = ()) -> None:
        """`starts` are the numbers that the corpora's samples have at the run's sample 0; 0 without them."""
        self.streams, self.sequence_length = streams, streams[0].sequence_length
        *self.firsts, self.num_padded_samples = accumulate((each.num_padded_samples for each in streams), initial=0)
        self._weights, self._starts = tuple(weights), tuple(starts) or (0,) * len(streams)

    def draw(self, seed: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the indices of the run's samples number `first` to `first + count - 1`."""
        order, begins = order_corpora(self._weights), count_taken(self._weights, first) + self._starts
        drawn, indices = order[np.arange(first, first + count) % len(order)], np.empty(count, dtype=np.int64)
        for number, (stream, begin) in enumerate(zip(self.streams, begins.tolist(), strict=True)):
            chosen = drawn == number
            own = sample_indices(stream.num_samples, seed, begin, int(chosen.sum()))
            indices[chosen] = self.firsts[number] + own
        return indices

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the corpus that has a sample, and the sample's index in its stream."""
        number = bisect_right(self.firsts, index) - 1
        return number, index - self.firsts[number]

    def fill(self, sample: npt.NDArray[np.int64], index: int) -> Row:
        number, own = self.locate(index)
        return self.streams[number].fill(sample, own)

    def prefetch(self, indices: npt.NDArray[np.int64]) -> None:
        """Ask the kernel to read the rows of these samples, each of its own corpus, without waiting for them."""
        for number, own in map(self.locate, indices.tolist()):
            self.streams[number].prefetch([own])


def open_rows(corpus: RunCorpus) -> list[CorpusRows]:
    """Return the rows of each of a run's corpora, which share one bound of maps."""
    most = max(1, MAX_MAPS // len(corpus.parts))
    return [CorpusRows(part.path, part.payload, most) for part in corpus.parts]


def open_mixture(
    corpus: RunCorpus, split: Split, rows: Sequence[CorpusRows] | None = None, starts: Iterable[int] = ()
) -> Mixture:
    """Open no file. Both splits of a process get the same `rows`."""
    streams = [TokenStream(each.folder, each.corpus, split, each) for each in rows or open_rows(corpus)]
    return Mixture(streams, [part.weight for part in corpus.parts], starts)
