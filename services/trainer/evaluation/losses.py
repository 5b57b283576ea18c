"""Adds up the losses of a validation split's targets by document, and computes the numbers of an evaluation.

All sums are float64 and follow the targets' positions in the split, so they do not depend on micro-batches and workers.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import CorpusPayload, SourceSplitCounts, SplitCounts


def perplexity(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token; infinite where that exceeds a float."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


@dataclass(frozen=True)
class MeanLoss:
    """Mean loss of some targets, with its standard error, bits per byte and perplexity."""

    loss: float
    """Mean over all targets, BOS and EOS included, in nats; NaN where there is no target."""
    standard_error: float | None
    """Standard error of `loss`, see `estimate_standard_error`; None with fewer than two documents."""
    tokens: int
    """Number of targets."""
    documents: int
    """Number of documents that the targets belong to."""
    bits_per_byte: float | None
    """Bits for each UTF-8 byte of the documents' text, see `LossTotals.mean`; None where there is no text."""

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass(frozen=True)
class Evaluation(MeanLoss):
    """Numbers of one evaluation."""

    sources: dict[str, MeanLoss]
    """Numbers of each source that has targets, by the label of the source; of a mixture, of each corpus by its name."""
    seconds: float
    """Seconds that the evaluation took."""


class LossTotals:
    """Sums of the losses of each document's targets. It has 48 bytes for each document of the split."""

    def __init__(
        self, corpora: Mapping[str, CorpusPayload], firsts: Sequence[int], begins: Sequence[npt.NDArray[np.int64]]
    ) -> None:
        """`begins` are the positions at which documents begin in the split of each corpus, from its first sample on."""
        self._corpora, first = corpora, next(iter(corpora.values()))
        self._length, self._num_special_tokens = first.sequence_length, first.vocabulary.num_special_tokens
        self._begins = [number * self._length for number in firsts]
        self._ends = [
            begin + corpus.splits["validation"].tokens
            for begin, corpus in zip(self._begins, corpora.values(), strict=True)
        ]
        begins = [begin + each for begin, each in zip(self._begins, begins, strict=True)]
        self._begins_D = np.concatenate(begins)
        self._firsts_D = self._begins_D + self._num_special_tokens - 1
        nexts = [np.append(each, end)[1:] for each, end in zip(begins, self._ends, strict=True)]
        self._lasts_D = np.concatenate(nexts) - 1
        self._nats_D, self._text_nats_D = np.zeros(len(self._begins_D)), np.zeros(len(self._begins_D))
        self._targets_D, self._text_targets_D = (np.zeros(len(self._begins_D), dtype=np.int64) for _ in range(2))

    def add(self, sample: int, losses_S: npt.NDArray[np.float32]) -> None:
        """Add the losses of a sample of the split, with or without padding. Call this in the order of the samples."""
        first = sample * self._length + 1
        end = self._ends[bisect_right(self._begins, first - 1) - 1]
        positions_T = np.arange(first, min(first + self._length, end))
        losses_T = losses_S[: len(positions_T)].astype(np.float64)
        documents_T = np.searchsorted(self._begins_D, positions_T, side="right") - 1
        is_text_T = (positions_T >= self._firsts_D[documents_T]) & (positions_T < self._lasts_D[documents_T])
        lowest, end = int(documents_T[0]), int(documents_T[-1]) + 1
        own_T, size = documents_T - lowest, end - lowest
        self._nats_D[lowest:end] += np.bincount(own_T, losses_T, size)
        self._targets_D[lowest:end] += np.bincount(own_T, minlength=size)
        self._text_nats_D[lowest:end] += np.bincount(own_T[is_text_T], losses_T[is_text_T], size)
        self._text_targets_D[lowest:end] += np.bincount(own_T[is_text_T], minlength=size)

    def finish(self, seconds: float) -> Evaluation:
        """Return the numbers of everything that was added."""
        splits = [corpus.splits["validation"] for corpus in self._corpora.values()]
        parts: Iterable[tuple[str, range, SplitCounts | SourceSplitCounts]]
        if len(splits) > 1:
            parts = zip(self._corpora, map(range, self._begins, self._ends), splits, strict=True)
        else:
            [corpus] = self._corpora.values()
            counted = (source.splits["validation"] for source in corpus.sources)
            parts = zip(source_labels(corpus), corpus.validation_ranges, counted, strict=True)
        sources = {}
        for label, tokens, counts in parts:
            theirs = slice(*np.searchsorted(self._begins_D, (tokens.start, tokens.stop)))
            mean = self.mean(theirs, counts.text_bytes, counts.tokens - self._num_special_tokens * counts.documents)
            if mean.tokens:
                sources[label] = mean
        text_bytes, text_tokens = (
            sum(getattr(each, name) for each in splits) for name in ("text_bytes", "document_tokens")
        )
        whole = self.mean(slice(0, len(self._begins_D)), text_bytes, text_tokens)
        return Evaluation(**vars(whole), sources=sources, seconds=seconds)

    def mean(self, documents: slice, text_bytes: int, text_tokens: int) -> MeanLoss:
        """Return the numbers of some documents, which have `text_bytes` UTF-8 bytes in `text_tokens` tokens.

        Bits per byte are those of lm-evaluation-harness: the nats of the text's tokens, without those of BOS and EOS,
        over ln 2 and the bytes of the text. Where some of these tokens were not evaluated, the bytes are taken to be as
        many as the evaluated tokens have on average.
        """
        nats, targets = self._nats_D[documents], self._targets_D[documents]
        num_targets, num_text_targets = int(targets.sum()), int(self._text_targets_D[documents].sum())
        loss = float(nats.sum()) / num_targets if num_targets else math.nan
        evaluated_bytes = text_bytes * (num_text_targets / text_tokens) if text_tokens else 0.0
        text_nats = float(self._text_nats_D[documents].sum())
        return MeanLoss(
            loss=loss,
            standard_error=estimate_standard_error(nats, targets),
            tokens=num_targets,
            documents=int(np.count_nonzero(targets)),
            bits_per_byte=text_nats / math.log(2) / evaluated_bytes if evaluated_bytes else None,
        )


def estimate_standard_error(nats_D: npt.NDArray[np.float64], targets_D: npt.NDArray[np.int64]) -> float | None:
    """Estimate the standard error of the mean loss from the sums of nats and the numbers of targets of documents.

    Documents are clusters of different sizes. With n documents, y nats and m targets in each, and R = sum(y) / sum(m),
    the variance of this ratio estimator is n / (n - 1) * sum((y - R m)^2) / sum(m)^2 (Cochran, Sampling Techniques,
    3rd ed., chapter 6; arXiv 2411.00640). Returns None with fewer than two documents.
    """
    has_targets_D = targets_D > 0
    nats_D, targets_D = nats_D[has_targets_D], targets_D[has_targets_D]
    count = len(nats_D)
    if count < 2:
        return None
    total = int(targets_D.sum())
    residuals_D = nats_D - nats_D.sum() / total * targets_D
    return math.sqrt(count / (count - 1) * float(np.square(residuals_D).sum())) / total


def source_labels(corpus: CorpusPayload) -> list[str]:
    """Return a label of each source: its uri, with the source's number where several have the same uri."""
    uris = [source.uri for source in corpus.sources]
    return [uri if uris.count(uri) == 1 else f"{uri} ({number})" for number, uri in enumerate(uris, 1)]
