"""A corpus as a dataset of torch, for any training loop."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.artifacts.upstream import open_corpus as open_published
from services.common.recipe.schema import Recipe


class CorpusDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of inputs and targets, int64 [sequence_length] each; a target is the token after its input.

    Reading raises `ArtifactError` for a row that does not fit its checksum. A process of a DataLoader may be forked or
    spawned.
    """

    def __init__(self, corpus: Artifact[CorpusManifest], split: Split = "train") -> None:
        self.corpus, self.split = corpus, split
        self._stream = TokenStream(corpus.path, corpus.manifest.corpus, split)

    def __len__(self) -> int:
        return self._stream.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index:,} of {len(self):,}")
        tokens = torch.from_numpy(self._stream.read([index])[0])
        return tokens[:-1], tokens[1:]

    def __reduce__(self) -> tuple[type[CorpusDataset], tuple[Artifact[CorpusManifest], Split]]:
        return CorpusDataset, (self.corpus, self.split)  # mapped files are opened again, and not copied


def open_corpus(recipe: Recipe, root: str | Path = "fsx", split: Split = "train") -> CorpusDataset:
    """Open a recipe's corpus below `root`. Raises `ArtifactError` where the tokenizer has not published it."""
    return CorpusDataset(open_published(recipe, Path(f"{recipe.name}.toml"), Path(root).absolute()), split)
