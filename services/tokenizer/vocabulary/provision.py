"""Provides the corpus's vocabulary: the file that the recipe names, or a SentencePiece model trained on the text."""

from __future__ import annotations

import logging
from pathlib import Path

import xxhash

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.manifest import ManifestModel, write_durably
from services.common.artifacts.upstream import advise_vocab_size
from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Recipe, VocabularyTraining
from services.tokenizer.corpus_inputs import CorpusInputs
from services.tokenizer.scratch import VOCABULARY, VOCABULARY_MARKER
from services.tokenizer.sources.file_system import read_vocabulary
from services.tokenizer.tasks import read_marker, write_marker
from services.tokenizer.vocabulary.description import describe_vocabulary
from services.tokenizer.vocabulary.text_sample import sample_text
from services.tokenizer.vocabulary.training import train_vocabulary

logger = logging.getLogger(__name__)


class _VocabularyMarker(ManifestModel):
    """The checksum of the vocabulary's file in scratch."""

    xxh3: str


def provide_vocabulary(recipe: Recipe, inputs: CorpusInputs, scratch: Path) -> tuple[Path, Vocabulary]:
    """Return the path of the vocabulary in `scratch`, and its description. A file that is there and whole is used.

    Raises `ArtifactError` for a file that is no usable vocabulary, and `RecipeError` when its size is not
    `model.vocab_size`.
    """
    path, marker_path = scratch / VOCABULARY, scratch / VOCABULARY_MARKER
    marker = read_marker(marker_path, _VocabularyMarker, lambda marker: {path: marker.xxh3})
    if marker:
        content = path.read_bytes()
    elif recipe.tokenizer.train:
        content = _train_on_corpus(recipe, recipe.tokenizer.train, inputs)
    else:
        content = _read_given(recipe, inputs)
    vocabulary = _describe(content, recipe)
    if not marker:
        write_durably(path, content)
        write_marker(marker_path, _VocabularyMarker(xxh3=xxhash.xxh3_128_hexdigest(content)))
    return path, vocabulary


def _describe(content: bytes, recipe: Recipe) -> Vocabulary:
    uri = recipe.tokenizer.model
    try:
        vocabulary = describe_vocabulary(content, recipe.tokenizer)
    except ArtifactError as error:
        raise ArtifactError(f"{uri}: {error}") from error
    if vocabulary.vocab_size != recipe.model.vocab_size:
        raise RecipeError(
            f"{uri} has {vocabulary.vocab_size:,} pieces, but model.vocab_size is {recipe.model.vocab_size:,}. "
            f"{advise_vocab_size(recipe.model, vocabulary.vocab_size)}, or name another tokenizer.model."
        )
    return vocabulary


def _train_on_corpus(recipe: Recipe, training: VocabularyTraining, inputs: CorpusInputs) -> bytes:
    documents = sample_text(recipe.corpus, inputs.listings, training.max_bytes)
    text_bytes = sum(map(len, documents))
    if not text_bytes:
        raise ArtifactError(
            f"The corpus is empty: the {inputs.num_files:,} files of corpus.sources hold no training text, and a "
            f"vocabulary is trained on it. Add text to corpus.sources."
        )
    logger.info("training a vocabulary of %s pieces on %s bytes of text", f"{training.vocab_size:,}", f"{text_bytes:,}")
    return train_vocabulary(documents, training.vocab_size)


def _read_given(recipe: Recipe, inputs: CorpusInputs) -> bytes:
    uri = str(recipe.tokenizer.model)
    content = read_vocabulary(uri)
    if inputs.vocabulary_link is None or xxhash.xxh3_128_hexdigest(content) != inputs.vocabulary_link.content_digest:
        raise ArtifactError(
            f"{uri}: the file has changed since the corpus's inputs were listed. Run the same command again."
        )
    return content
