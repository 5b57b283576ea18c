"""Which documents training never sees."""

from __future__ import annotations

import xxhash

from services.common.artifacts.corpus import Split


def assign_split(document: bytes, validation_fraction: float) -> Split:
    """Train or validation by the document's content alone, so equal documents are never on both sides."""
    return "validation" if xxhash.xxh3_64_intdigest(document) < validation_fraction * 2**64 else "train"
