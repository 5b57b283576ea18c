"""Publishes a corpus of any number of shards in seconds: all shards are hard links of one, except those that are read.

The manifest is that of a real corpus of so many shards, so a program that opens nothing else cannot tell. The rows of
the first step's samples are real ones. All other rows would be found damaged, because the check of a row depends on its
number.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import (
    SPLITS,
    CorpusManifest,
    Split,
    SplitCounts,
    shard_path,
    tail_path,
)
from services.common.artifacts.files import describe_file
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Address, Artifact, Draft, Workspace, artifact_id, publish_once
from services.common.recipe.schema import Recipe
from services.common.testing.corpora import corpus_payload
from services.trainer.data import sample_indices
from services.trainer.tests.builders import write_rows

LINKS_PER_FILE = 30_000
"""Hard links of one file; ext4 allows 65,000."""


def publish_linked_corpus(
    root: Path, recipe: Recipe, num_shards: int, vocabulary_of: Artifact[CorpusManifest]
) -> Artifact[CorpusManifest]:
    """Publish a corpus of `num_shards` shards for the training, with the vocabulary of another corpus."""
    address = Address(root, "corpus", recipe.corpus.name, artifact_id(recipe, "corpus", 1, []))
    build = lambda workspace: _fill(workspace, recipe, num_shards, vocabulary_of)  # noqa: E731
    return publish_once(address, CorpusManifest, "tokenizer", recipe, build)[0]


def _fill(workspace: Workspace, recipe: Recipe, num_shards: int, vocabulary_of: Artifact[CorpusManifest]) -> Draft:
    vocabulary = vocabulary_of.manifest.corpus.vocabulary
    (workspace.files / vocabulary.path).parent.mkdir()
    shutil.copyfile(vocabulary_of.path / vocabulary.path, workspace.files / vocabulary.path)
    entries, splits = [describe_file(workspace.files, vocabulary.path)], {}
    for split, number in zip(SPLITS, (num_shards, 1), strict=True):
        found, splits[split] = _fill_split(workspace.files, recipe, split, number)
        entries += found
    payload = corpus_payload(
        vocabulary,
        splits,
        sequence_length=recipe.corpus.sequence_length,
        rows_per_shard=recipe.corpus.rows_per_shard,
    )
    return Draft(payload, files=tuple(sorted(entries, key=lambda entry: entry.path)))


def _fill_split(folder: Path, recipe: Recipe, split: Split, num_shards: int) -> tuple[list[FileEntry], SplitCounts]:
    rows = num_shards * recipe.corpus.rows_per_shard
    (folder / tail_path(split)).parent.mkdir(parents=True)
    read = {row // recipe.corpus.rows_per_shard for row in _rows_of_first_step(recipe, rows)}
    entries, digests = [], []
    digest = ""
    for number in range(num_shards):
        path = shard_path(split, number)
        if number % LINKS_PER_FILE == 0 or number in read:
            written = _write_shard(folder / path, recipe, split, number)
            entry = describe_file(folder, path)
            if number % LINKS_PER_FILE == 0:
                source, linked, digest = folder / path, entry, written
        else:
            os.link(source, folder / path)
            entry, written = replace(linked, path=path), digest
        entries.append(entry)
        digests.append(written)
    digests.append(write_rows(folder / tail_path(split), split, rows, _ids(recipe, 1)[:, :1], [[0]]))
    entries.append(describe_file(folder, tail_path(split)))
    tokens = rows * recipe.corpus.sequence_length + 1
    counts = SplitCounts(
        documents=rows + 1,
        text_bytes=tokens,
        document_tokens=tokens - 2 * (rows + 1),
        bos=rows + 1,
        eos=rows + 1,
        rows=rows,
        tail_tokens=1,
        check_digests=tuple(digests),
    )
    return entries, counts


def _rows_of_first_step(recipe: Recipe, rows: int) -> set[int]:
    samples = sample_indices(rows, recipe.train.data_seed, 0, recipe.batch.global_batch_size)
    return {int(row) for row in (*samples, *(samples + 1)) if row < rows}


def _write_shard(path: Path, recipe: Recipe, split: Split, number: int) -> str:
    rows = recipe.corpus.rows_per_shard
    return write_rows(path, split, number * rows, _ids(recipe, rows), [[0]] * rows)


def _ids(recipe: Recipe, rows: int) -> npt.NDArray[np.uint16]:
    length = recipe.corpus.sequence_length
    return (np.arange(rows * length) % recipe.model.vocab_size).astype(np.uint16).reshape(rows, length)
