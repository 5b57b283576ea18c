"""`train-vocab` trains a vocabulary that several recipes can name, instead of one vocabulary for each recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, get_args

import typer
from pydantic import ValidationError

from services.common.artifacts.manifest import write_durably
from services.common.errors import RecipeError, adding_path
from services.common.process.command_line import one_of
from services.common.recipe.schema import Corpus, Source, VocabularyTraining
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.sources.jsonl import require_key
from services.tokenizer.vocabulary.provision import train_on_sample

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
    # No document is kept for validation, and the length of rows changes no text.
    corpus = Corpus(name="vocabulary", sources=tuple(sources), sequence_length=8, validation_fraction=0.0)
    listings = tuple(list_inputs(source) for source in sources)
    for listing in listings:
        require_key(listing, corpus.max_document_bytes)
    with _reserving(path):  # not before: the sources' folder may be that of the output
        model, documents = train_on_sample(corpus, listings, training)
        with adding_path(path.parent):
            write_durably(path, model)
    print(_describe(path, model, documents))
    return 0


@contextmanager
def _reserving(path: Path) -> Iterator[None]:
    """Make an empty file that the block replaces, and remove it if the block fails. Training takes minutes."""
    try:
        path.open("xb").close()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be made: {error.strerror}. Pass another --output.") from error
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


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
