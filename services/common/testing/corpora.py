"""Makes the payload of a small corpus's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from services.common.artifacts.corpus import CorpusPayload, Split, SplitCounts, Vocabulary


def corpus_payload(
    vocabulary: Vocabulary,
    splits: Mapping[Split, SplitCounts],
    *,
    sequence_length: int,
    rows_per_shard: int,
    token_dtype: Literal["uint16", "uint32"] = "uint16",
) -> CorpusPayload:
    """Return the payload of a corpus without an encoder and without dropped documents."""
    return CorpusPayload(
        vocabulary=vocabulary,
        token_dtype=token_dtype,
        sequence_length=sequence_length,
        rows_per_shard=rows_per_shard,
        encoder="none",
        reference="none",
        documents_checked=0,
        control_text="text",
        documents_read=sum(counts.documents for counts in splits.values()),
        documents_empty=0,
        documents_too_short=0,
        documents_duplicate=0,
        documents_not_sampled=0,
        documents_repeated=0,
        documents_with_invalid_utf8=0,
        bad_rows={},
        bad_files=(),
        sources=(),
        splits=dict(splits),
        source_code="none",
        phases=(),
    )
