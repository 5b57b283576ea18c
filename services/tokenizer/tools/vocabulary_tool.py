"""`train-vocab` trains a vocabulary that several recipes can name, instead of one vocabulary for each recipe."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from services.common.artifacts.manifest import write_durably
from services.common.errors import ArtifactError, RecipeError, naming_the_place
from services.common.process.brought_files import offer_file
from services.common.process.telemetry import configure_logging
from services.common.recipe.schema import Corpus, Source, VocabularyTraining
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.sources.documents import list_inputs, require_column
from services.tokenizer.tools.tool_parser import ToolParser
from services.tokenizer.vocabulary.text_sample import sample_text
from services.tokenizer.vocabulary.training import train_vocabulary

logger = logging.getLogger(__name__)


def train_vocab(argv: list[str]) -> int:
    """Train a SentencePiece model on text, with the settings of [tokenizer.train]."""
    parser = ToolParser("train-vocab", f"{train_vocab.__doc__} The same text gives the same bytes.")
    parser.add_argument("uris", nargs="+", metavar="SOURCE", help="a source, written as `uri` is in [[corpus.sources]]")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="path of the new model; the file must not exist"
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of pieces in the vocabulary")
    parser.add_argument(
        "--max-bytes", type=int, metavar="B", help=f"sample B bytes of the sources' text (default: {_max_bytes():,})"
    )
    parser.add_argument("--column", help="JSON key, or Parquet or Arrow column, that holds the text (default: text)")
    parser.add_argument(
        "--format", choices=_formats(), help="file format of all sources (default: auto, chosen by file name extension)"
    )
    arguments = parser.parse(argv)
    try:
        sources = [
            Source(uri=uri, **_given(column=arguments.column, format=arguments.format)) for uri in arguments.uris
        ]
        training = VocabularyTraining(vocab_size=arguments.vocab_size, **_given(max_bytes=arguments.max_bytes))
    except ValidationError as error:
        problem = error.errors()[0]
        option = "-".join(map(str, problem["loc"])).replace("_", "-") or "sources"
        parser.error(f"{option}: {problem['msg']}, got {problem['input']!r}")
    configure_logging("tokenizer")
    path: Path = arguments.output.absolute()
    _require_free(path)
    # No document is kept for validation, and the length of rows changes no text.
    corpus = Corpus(name="vocabulary", sources=tuple(sources), sequence_length=8, validation_fraction=0.0)
    files = [list_inputs(source) for source in sources]
    for listing in files:
        require_column(listing, corpus.max_document_bytes)
    documents = sample_text(corpus, files, training.max_bytes)
    model = _train(documents, training.vocab_size, sources)
    _require_free(path)  # training takes minutes, and another command may have written the file
    with naming_the_place(path.parent):
        write_durably(path, model)
    print(_describe(path, model, documents))
    offer_file(path)
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


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that the command line sets; `Source` and `VocabularyTraining` have the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _formats() -> tuple[str, ...]:
    return get_args(Source.model_fields["format"].annotation)


def _max_bytes() -> int:
    return int(VocabularyTraining.model_fields["max_bytes"].default)
