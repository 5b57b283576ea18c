"""`train-vocab` trains a vocabulary that several recipes can name, instead of one vocabulary for each recipe."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer
from pydantic import ValidationError

from services.common.artifacts.manifest import write_durably
from services.common.errors import ArtifactError, RecipeError, adding_path
from services.common.process.command_line import one_of
from services.common.recipe.schema import Corpus, Source, VocabularyTraining
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.sources.documents import list_inputs, require_column
from services.tokenizer.vocabulary.text_sample import sample_text
from services.tokenizer.vocabulary.training import train_vocabulary

logger = logging.getLogger(__name__)

FORMATS = get_args(Source.model_fields["format"].annotation)
MAX_BYTES = int(VocabularyTraining.model_fields["max_bytes"].default)


def train_vocab(
    uris: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="sources, written as `uri` is in [[corpus.sources]]")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="path of the new model; the file must not exist")],
    vocab_size: Annotated[int, typer.Option(metavar="N", help="number of pieces in the vocabulary")],
    max_bytes: Annotated[int, typer.Option(metavar="B", help="sample B bytes of the sources' text")] = MAX_BYTES,
    column: Annotated[str, typer.Option(help="JSON key, or Parquet or Arrow column, that holds the text")] = "text",
    format: Annotated[
        str, typer.Option(callback=one_of(FORMATS), help=f"file format of all sources: {', '.join(FORMATS)}")
    ] = "auto",
) -> int:
    """Train a SentencePiece model on text, with the settings of [tokenizer.train].

    The same text gives the same bytes.
    """
    try:
        sources = [Source.model_validate({"uri": uri, "column": column, "format": format}) for uri in uris]
        training = VocabularyTraining(vocab_size=vocab_size, max_bytes=max_bytes)
    except ValidationError as error:
        problem = error.errors()[0]
        name = "-".join(map(str, problem["loc"])).replace("_", "-")
        raise typer.BadParameter(f"{problem['msg']}, got {problem['input']!r}", param_hint=name) from error
    path = output.absolute()
    _require_free(path)
    # No document is kept for validation, and the length of rows changes no text.
    corpus = Corpus(name="vocabulary", sources=tuple(sources), sequence_length=8, validation_fraction=0.0)
    files = [list_inputs(source) for source in sources]
    for listing in files:
        require_column(listing, corpus.max_document_bytes)
    documents = sample_text(corpus, files, training.max_bytes)
    model = _train(documents, training.vocab_size, sources)
    _require_free(path)  # training takes minutes, and another command may have written the file
    with adding_path(path.parent):
        write_durably(path, model)
    print(_describe(path, model, documents))
    return 0


def _train(documents: Sequence[bytes], vocab_size: int, sources: Sequence[Source]) -> bytes:
    text_bytes = sum(map(len, documents))
    if not text_bytes:
        raise ArtifactError(
            f"{', '.join(source.uri for source in sources)}: the sources hold no text to train a vocabulary on."
        )
    logger.info("training a vocabulary of %s pieces on %s bytes of text", f"{vocab_size:,}", f"{text_bytes:,}")
    try:
        return train_vocabulary(documents, vocab_size)
    except RecipeError as error:
        raise RecipeError(f"{error} On the command line of train-vocab this value is --vocab-size.") from error


def _describe(path: Path, model: bytes, documents: Sequence[bytes]) -> str:
    processor = load_model(model)
    return f"""\
written  {path}
  size    {len(model):,} bytes
  pieces  {processor.vocab_size():,}, BOS is {processor.bos_id()}, EOS is {processor.eos_id()}
  sha256  {hashlib.sha256(model).hexdigest()}
  text    {sum(map(len, documents)):,} bytes of {len(documents):,} documents

In a recipe, instead of [tokenizer.train]:

[tokenizer]
model = {json.dumps(str(path))}

[model]
vocab_size = {processor.vocab_size()}"""


def _require_free(path: Path) -> None:
    """Raise `RecipeError` unless a new file can be written at `path`."""
    if path.exists():
        raise RecipeError(
            f"{path}: the file exists. It is not overwritten, because a recipe may name it. "
            f"Pass another --output, or move the file away."
        )
    if not path.parent.is_dir():
        raise RecipeError(f"{path.parent}: the folder does not exist. Make it, or pass another --output.")
    if not os.access(path.parent, os.W_OK):
        raise RecipeError(f"{path.parent}: this user cannot write to the folder. Pass another --output.")
