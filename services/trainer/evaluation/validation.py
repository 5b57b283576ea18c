"""Evaluates a program on the validation split: always on the same targets, whatever the micro-batch and the workers.

A mixture has one split, which holds those of its corpora one after the other, whatever their weights. The samples of
the split, of which the last may be padded, are evaluated in the order of their positions. In a round
each model replica evaluates one micro-batch. What the last micro-batch and the last round lack are repetitions of the
last sample, which are not counted, so all workers run one graph in a split of any size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.common.artifacts.corpus_rows import CorpusRows
from services.common.artifacts.token_stream import Samples
from services.common.program.mesh import Mesh
from services.common.program.micro_batch import MicroBatch
from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.trainer.data import permute, read_micro_batch
from services.trainer.evaluation.losses import Evaluation, LossTotals
from services.trainer.job import RunCorpus
from services.trainer.mixture import open_mixture

PERMUTATION_SEED = -1
"""Seed of the permutation that chooses the samples of a bounded evaluation. It is no run's: those are 0 or more."""


class Validation:
    """The targets of a run's validation splits on which states are evaluated; weights of a mixture do not count."""

    def __init__(
        self, recipe: Recipe, corpus: RunCorpus, num_tokens: int | None, rows: Sequence[CorpusRows] | None = None
    ) -> None:
        """Choose `num_tokens` targets, rounded up to whole samples, or all of them for None.

        A process that reads the training split, too, gives the `rows` that both splits read from.
        """
        self._recipe, self._corpora = recipe, corpus.payloads
        self._stream = open_mixture(corpus, "validation", rows)
        self._samples = choose_samples(self._stream, num_tokens)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to evaluate: the split has no target, or 0 targets were asked for."""
        return len(self._samples) == 0

    @cached_property
    def _document_starts(self) -> list[npt.NDArray[np.int64]]:
        """Positions at which the documents of each corpus begin, read at the first evaluation and kept."""
        return [stream.document_starts() for stream in self._stream.streams]

    def evaluate(self, program: Program, goes_on: Callable[[], bool] = lambda: True) -> Evaluation | None:
        """Evaluate the program's state. All workers call this together, and get the same numbers.

        `goes_on` is called after each round. Where it returns False, on all workers or on none, the evaluation ends
        without a result, None, unless that was the last round. Raises `WorkersLost`.
        """
        started, totals = time.perf_counter(), LossTotals(self._corpora, self._stream.firsts, self._document_starts)
        waiting: tuple[npt.NDArray[np.int64], Tensor] | None = None
        mesh = program.backend.mesh
        size = mesh.data_parallel_size * self._recipe.batch.micro_batch_size
        starts = range(0, len(self._samples), size)
        for start in starts:
            losses = program.evaluate(self._micro_batch(start, mesh))
            if waiting:  # while the device computes this round
                _add(totals, program, *waiting)
            waiting = self._samples[start : start + size], losses
            if not goes_on() and start != starts[-1]:
                return None
        if waiting:
            _add(totals, program, *waiting)
        return totals.finish(time.perf_counter() - started)

    def _micro_batch(self, first: int, mesh: Mesh) -> MicroBatch:
        """Read this worker's micro-batch of the round that begins with sample number `first` of the evaluation."""
        size = self._recipe.batch.micro_batch_size
        numbers = first + mesh.index("data") * size + np.arange(size)
        samples = self._samples[np.minimum(numbers, len(self._samples) - 1)]
        return read_micro_batch(self._stream, samples, self._recipe)


def choose_samples(stream: Samples, num_tokens: int | None) -> npt.NDArray[np.int64]:
    """Return the samples of an evaluation of `num_tokens` targets, in ascending order.

    They are the first ones of a fixed permutation, so that a part of the split is no particular part of the text.
    """
    num_samples = stream.num_padded_samples
    wanted = num_samples if num_tokens is None else min(num_samples, -(-num_tokens // stream.sequence_length))
    if wanted == num_samples:
        return np.arange(num_samples)
    return np.sort(permute(np.arange(wanted), num_samples, PERMUTATION_SEED, epoch=0))


def _add(totals: LossTotals, program: Program, samples: npt.NDArray[np.int64], losses: Tensor) -> None:
    losses_RS = program.backend.to_host(losses).numpy()
    for sample, losses_S in zip(samples.tolist(), losses_RS, strict=False):  # repetitions come last
        totals.add(sample, losses_S)
