"""Writes the tokenizer of an exported folder, once its ids are those of the corpus."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.corpus_rows import map_files
from services.common.artifacts.manifest import write_durably
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.input.files import read_file
from services.common.vocabularies.codec import Codec, load_codec
from services.common.vocabularies.fuzz import fuzz_of_vocabulary
from services.trainer.conversion.configuration import TOKENIZER_CONFIG
from services.trainer.conversion.hugging_face_tokenizer import (
    InconvertibleVocabularyError,
    find_difference,
    make_tokenizer,
    tokenizer_config,
)

TOKENIZER = "tokenizer.json"
NO_TOKENIZER = "NO_TOKENIZER.txt"
"""File with the reason why a folder has no tokenizer."""
VOCABULARY_FOLDER = "vocabulary"
"""Folder of the vocabulary's file if there is no tokenizer, where transformers does not find the file."""
FUZZ_TEXTS = 1_000
CHECKED_TOKENS = 2**20
"""Number of validation tokens, in whole documents, that are encoded again: 5 seconds."""

logger = logging.getLogger(__name__)


def write_tokenizer(
    folder: Path, corpus: Artifact[CorpusManifest], vocabulary_file: Path, imported: Mapping[str, Any]
) -> None:
    """Write the files by which AutoTokenizer gives the corpus's ids, and the vocabulary's file. `imported` are settings
    of an imported tokenizer, see `tokenizer_config`.

    Documents of the validation split and fuzz texts are encoded by the tokenizer and by the vocabulary's library. If
    one of them gets other ids, or the tokenizers library does not have the vocabulary's rules, no tokenizer is written
    but `NO_TOKENIZER.txt`, with the reason.
    """
    vocabulary = corpus.manifest.corpus.vocabulary
    content, codec = read_file(vocabulary_file), load_codec(vocabulary_file, vocabulary)
    try:
        tokenizer = make_tokenizer(content, vocabulary)
        texts = [text.decode() for text in fuzz_of_vocabulary(content, vocabulary, FUZZ_TEXTS)]
        texts += _decode_documents(corpus, codec)
        if difference := find_difference(tokenizer, codec, vocabulary.bos_id, texts):
            raise InconvertibleVocabularyError(difference)
    except InconvertibleVocabularyError as error:
        logger.warning("no tokenizer is exported: %s", error)
        reason = (
            f"This folder has no tokenizer for transformers, because its ids would not be those that the model was "
            f"trained on. {error}\n\nEncode texts with the library of {VOCABULARY_FOLDER}/{vocabulary_file.name}, and "
            f"put the id {vocabulary.bos_id} (BOS) before every document.\n"
        )
        (folder / VOCABULARY_FOLDER).mkdir()
        write_durably(folder / NO_TOKENIZER, reason.encode())
        write_durably(folder / VOCABULARY_FOLDER / vocabulary_file.name, content)
        return
    config = tokenizer_config(tokenizer, vocabulary, corpus.manifest.corpus.sequence_length, imported)
    if vocabulary_file.name != TOKENIZER:
        write_durably(folder / vocabulary_file.name, content)
    write_durably(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    write_durably(folder / TOKENIZER_CONFIG, json.dumps(config, indent=2).encode())
    logger.info("the tokenizer gives the ids of %s for %s texts", corpus.manifest.corpus.reference, f"{len(texts):,}")


def _decode_documents(corpus: Artifact[CorpusManifest], codec: Codec) -> Iterator[str]:
    """Yield texts of documents, from the whole validation split or, if it is empty, from the training split."""
    has_validation = corpus.manifest.corpus.splits["validation"].documents > 0
    for ids in sample_documents(corpus, "validation" if has_validation else "train", CHECKED_TOKENS):
        try:
            yield codec.decode(ids[1:-1].tolist())
        except LookupError as error:
            raise ArtifactError(
                f"{corpus.path}: its vocabulary has no text for an id of its tokens ({error})."
            ) from error


def sample_documents(
    corpus: Artifact[CorpusManifest], split: Split, max_tokens: int
) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield the ids of every n-th document of a split, BOS and EOS included; they have about `max_tokens` or fewer."""
    payload = corpus.manifest.corpus
    stride, number = max(1, -(-payload.splits[split].tokens // max_tokens)), -1
    parts: list[npt.NDArray[np.integer[Any]]] = []
    for file in map_files(corpus.path, payload, split):
        rows = np.arange(len(file.start_offsets) - 1)
        begins = np.repeat(rows * payload.sequence_length, np.diff(file.start_offsets)) + file.starts
        before, *documents = np.split(file.tokens, begins)
        if parts:
            parts.append(before)
        for document in documents:
            if parts:
                yield np.concatenate(parts)
            number += 1
            parts = [document] if number % stride == 0 else []
    if parts:
        yield np.concatenate(parts)
