"""The tokens of a split as one stream, which the encode tasks have left in a file for each partition.

The command writes a file with the position at which each partition begins in the stream, 8 bytes for a partition. A
task that is given the folder maps that file, and opens the files of the partitions that it reads from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Split
from services.common.errors import ArtifactError
from services.tokenizer.atomic_file import write_file
from services.tokenizer.encode_task import read_whole_partition
from services.tokenizer.encoding.encoder import Offsets, TokenIds
from services.tokenizer.mapped_array import map_array
from services.tokenizer.scratch_tree import starts_path, tokens_path


@dataclass(frozen=True)
class TokenRuns:
    """Reads tokens of a split by their positions. `folder` has the files of the encode tasks."""

    folder: Path
    split: Split
    token_dtype: str

    @property
    def _begins_path(self) -> Path:
        return self.folder / f"{self.split}.begins"

    def write_begins(self, num_tokens: npt.NDArray[np.int64]) -> None:
        """Write where every partition begins. Partition i has `num_tokens[i]` tokens."""
        begins = np.zeros(len(num_tokens) + 1, np.int64)
        np.cumsum(num_tokens, out=begins[1:])
        with write_file(self._begins_path) as file:
            file.write(begins.tobytes())

    def read(self, begin: int, end: int) -> tuple[TokenIds, Offsets]:
        """Return tokens [begin, end) of the split, and the positions among them at which documents begin.

        The files of a partition are compared with their checksums by the read that has the partition's first token, so
        once for a split that is read in parts. They are not synced, and a node that was lost may have left zeros in
        them. Raises `ArtifactError` for a partition's file that is not as its task wrote it.
        """
        tokens: TokenIds = np.empty(end - begin, self.token_dtype)
        starts: list[Offsets] = [np.empty(0, np.int64)]
        for index, first, last in self._runs(begin, end):
            low, high = max(begin, first) - first, min(end, last) - first
            path = tokens_path(self.folder, index, self.split)
            is_to_check = begin <= first < end
            own = map_array(path, self.token_dtype) if path.exists() else np.empty(0, self.token_dtype)
            if len(own) != last - first or (is_to_check and not read_whole_partition(self.folder, index, [self.split])):
                raise ArtifactError(
                    f"{path}: is not as its task wrote it ({len(own):,} of {last - first:,} tokens, or other bytes). "
                    f"Run the same command again, which encodes the partition anew."
                )
            at = first - begin
            tokens[at + low : at + high] = own[low:high]
            own_starts = map_array(starts_path(self.folder, index, self.split), np.int64)
            from_document, to_document = np.searchsorted(own_starts, [low, high])
            starts.append(own_starts[from_document:to_document] + at)
        return tokens, np.concatenate(starts)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number, the begin and the end of every partition with tokens in [begin, end)."""
        begins = map_array(self._begins_path, np.int64)
        index = int(np.searchsorted(begins, begin, side="right")) - 1
        while index < len(begins) - 1 and begins[index] < end:
            if begins[index] < begins[index + 1]:
                yield index, int(begins[index]), int(begins[index + 1])
            index += 1
