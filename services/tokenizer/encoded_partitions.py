"""The results of all encode tasks, as sums and columns: 72 bytes of memory for a partition, and 40 of the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.corpus import SPLITS, BadFile, SourceSplitCounts, Split
from services.tokenizer.encode_task import EncodedPartition
from services.tokenizer.encoding.encoder import BOS_AND_EOS
from services.tokenizer.partition_plan import Partitions
from services.tokenizer.sources.bad_rows import add_up

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class SplitTotals:
    """Sums over all partitions of a split."""

    documents: int
    text_bytes: int
    document_tokens: int

    @property
    def tokens(self) -> int:
        return self.document_tokens + BOS_AND_EOS * self.documents


class EncodedPartitions:
    """Adds up results of encode tasks in any order. `partitions` are those of the plan."""

    def __init__(self, partitions: Partitions) -> None:
        self.sources: npt.NDArray[np.int32] = partitions["source"]
        self._is_first_pass: npt.NDArray[np.bool_] = partitions["pass_number"] == 0
        self.encoders: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.documents, self.text_bytes, self.document_tokens = (
            {split: np.zeros(len(partitions), np.int64) for split in SPLITS} for _ in range(3)
        )
        self.duplicates = np.zeros(len(partitions), np.int64)
        self._bad_files: dict[int, tuple[BadFile, ...]] = {}
        self.files_repaired, self.files_without_text = set[str](), set[str]()
        self._text_digests = np.zeros((len(partitions), _DIGEST_BYTES), np.uint8)

    def add(self, index: int, encoded: EncodedPartition) -> None:
        """Add the result of the encode task of partition `index`."""
        self.encoders.add(encoded.encoder)
        self.counts.update(encoded.counts)
        self._text_digests[index] = np.frombuffer(bytes.fromhex(encoded.text_xxh3), np.uint8)
        self.duplicates[index] = encoded.counts["documents_duplicate"]
        self.files_repaired.update(encoded.files_repaired)
        self.files_without_text.update(encoded.files_without_text)
        if encoded.bad_files and self._is_first_pass[index]:
            self._bad_files[index] = encoded.bad_files
        for split, part in encoded.parts.items():
            self.documents[split][index] = part.documents
            self.text_bytes[split][index] = part.text_bytes
            self.document_tokens[split][index] = part.document_tokens

    @property
    def bad_files(self) -> list[BadFile]:
        """The files with bad rows, each row counted in the first pass over its source; the worst file is first."""
        return add_up(chain.from_iterable(self._bad_files[index] for index in sorted(self._bad_files)))

    def tokens(self, split: Split) -> npt.NDArray[np.int64]:
        """Return the number of tokens of every partition in a split, with BOS and EOS."""
        return self.document_tokens[split] + BOS_AND_EOS * self.documents[split]

    def totals(self, split: Split) -> SplitTotals:
        """Return the sums of a split over all partitions."""
        columns = self.documents[split], self.text_bytes[split], self.document_tokens[split]
        return SplitTotals(*(int(column.sum()) for column in columns))

    def totals_of_source(self, source: int, split: Split) -> SourceSplitCounts:
        """Return the sums of a split over the partitions of one source."""
        is_own = self.sources == source
        return SourceSplitCounts(
            documents=int(self.documents[split][is_own].sum()),
            tokens=int(self.tokens(split)[is_own].sum()),
            text_bytes=int(self.text_bytes[split][is_own].sum()),
        )

    def text_digest(self, source: int) -> str:
        """Return a hash of the documents of a source, as they were read, in the order of the corpus."""
        return xxhash.xxh3_128_hexdigest(self._text_digests[(self.sources == source) & self._is_first_pass].tobytes())
