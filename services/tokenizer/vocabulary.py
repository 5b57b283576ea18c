"""The corpus's vocabulary: a SentencePiece model that the recipe names, or one that is trained on the text."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.manifest import write_durably
from services.common.errors import ArtifactError, MillraceError, RecipeError
from services.common.recipe import Recipe, VocabularyTraining
from services.tokenizer.plan import Plan
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.split_assignment import assign_split

logger = logging.getLogger(__name__)

MODEL = "tokenizer.model"
MODEL_IN_CORPUS = f"tokenizer/{MODEL}"

# Llama 2's: nothing is normalised away, and bytes stand in for characters without a piece.
_LLAMA2_SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "character_coverage": 0.99995,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
}
_LINE_CHARACTERS = 2**20
_LINE_BYTES = 4 * _LINE_CHARACTERS
# SentencePiece writes this character for what it does not know, and leaves out whole lines that contain it.
_RESERVED_CHARACTER = "\u2585"
_LOG_ERRORS_ONLY = 2


def provide_vocabulary(recipe: Recipe, plan: Plan, scratch: Path) -> tuple[Path, Vocabulary]:
    """The model's file in `scratch`, made unless an earlier attempt left it there, and its description.

    Raises `ArtifactError` for a file that is no usable model, `RecipeError` when the recipe asks for another size.
    """
    path = scratch / MODEL
    if not path.exists():
        model = (
            _train_on_corpus(recipe, recipe.tokenizer.train, plan) if recipe.tokenizer.train else _read_given(recipe)
        )
        write_durably(path, model)
    return path, _describe(path.read_bytes())


def train_vocabulary(documents: Iterable[bytes], vocab_size: int) -> bytes:
    """A SentencePiece BPE model trained on documents. The same documents give the same bytes.

    Raises `RecipeError` when the text is too small for so many pieces, or has more characters than pieces.
    """
    model = io.BytesIO()
    failures: list[RuntimeError] = []
    is_abandoned, is_done = threading.Event(), threading.Event()

    def read_lines() -> Iterator[str]:
        for line in _read_lines(documents):
            if is_abandoned.is_set():
                return
            yield line

    def train() -> None:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=read_lines(),
                model_writer=model,
                vocab_size=vocab_size,
                max_sentence_length=_LINE_BYTES,
                num_threads=1,  # the model's bytes depend on it
                minloglevel=_LOG_ERRORS_ONLY,
                **_LLAMA2_SETTINGS,
            )
        except RuntimeError as error:
            failures.append(error)
        finally:
            is_done.set()

    # Minutes of C++ for a large text: in a thread, so that Ctrl-C and SIGTERM still reach this one.
    threading.Thread(target=train, name="train-vocabulary", daemon=True).start()
    try:
        # Not join: interrupted by a signal, Python 3.11's takes the thread for ended.
        while not is_done.wait(0.1):
            pass
    finally:
        # While C++ asks for lines it runs Python below it, and a Python that ends then aborts the process (SIGABRT).
        is_abandoned.set()
        is_done.wait(1)
    if failures:
        raise _explain_failure(failures[0], vocab_size) from failures[0]
    return model.getvalue()


def load_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Raises `ArtifactError` for bytes that are no SentencePiece model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(f"Not a SentencePiece model ({error}).") from error


def _train_on_corpus(recipe: Recipe, training: VocabularyTraining, plan: Plan) -> bytes:
    documents = list(_read_training_text(recipe, training, plan))
    text_bytes = sum(map(len, documents))
    if not text_bytes:
        raise ArtifactError(
            f"The corpus is empty: no training text in {plan.input_files:,} files of corpus.sources, "
            f"so no vocabulary can be made from it."
        )
    logger.info("training a vocabulary of %s pieces on %s bytes of text", f"{training.vocab_size:,}", f"{text_bytes:,}")
    return train_vocabulary(documents, training.vocab_size)


def _read_training_text(recipe: Recipe, training: VocabularyTraining, plan: Plan) -> Iterator[bytes]:
    """The training split's first `max_bytes`; the document at the end is cut."""
    room = training.max_bytes
    for split in plan.splits:
        for document in read_documents(split.pieces, recipe.corpus.invalid_utf8):
            if assign_split(document.text, recipe.corpus.validation_fraction) == "train":
                yield document.text[:room].decode("utf-8", "ignore").encode()
                room -= len(document.text)
            if room <= 0:
                return


def _read_lines(documents: Iterable[bytes]) -> Iterator[str]:
    for document in documents:
        for line in document.decode().replace(_RESERVED_CHARACTER, "\n").split("\n"):
            for begin in range(0, len(line), _LINE_CHARACTERS):
                yield line[begin : begin + _LINE_CHARACTERS]


def _read_given(recipe: Recipe) -> bytes:
    uri = str(recipe.tokenizer.model)
    with open_file(uri) as file:
        model = file.read()
    try:
        processor = load_model(model)
    except ArtifactError as error:
        raise ArtifactError(f"{uri}: {error} tokenizer.model names a SentencePiece model file.") from error
    if processor.vocab_size() != recipe.model.vocab_size:
        raise RecipeError(
            f"{uri} has {processor.vocab_size():,} pieces, model.vocab_size is {recipe.model.vocab_size:,}. "
            f"Set model.vocab_size = {processor.vocab_size()}, or name another tokenizer.model."
        )
    if min(processor.bos_id(), processor.eos_id()) < 0:
        raise ArtifactError(f"{uri}: has no BOS or no EOS piece, and every document is stored between the two.")
    if not any(processor.is_byte(piece) for piece in range(processor.vocab_size())):
        logger.warning("%s has no byte pieces: characters it does not know become <unk> and are lost", uri)
    return model


def _describe(model: bytes) -> Vocabulary:
    processor = load_model(model)
    return Vocabulary(
        kind="sentencepiece",
        path=MODEL_IN_CORPUS,
        sha256=hashlib.sha256(model).hexdigest(),
        vocab_size=processor.vocab_size(),
        bos_id=processor.bos_id(),
        eos_id=processor.eos_id(),
    )


def _explain_failure(error: RuntimeError, vocab_size: int) -> MillraceError | RuntimeError:
    message = str(error)
    wanted = f"tokenizer.train.vocab_size {vocab_size:,}"
    if most := re.search(r"set it to a value <= (\d+)", message):
        return RecipeError(
            f"{wanted} is too large for this text, which has pieces for {int(most[1]):,} at most. "
            f"Lower it (and model.vocab_size), or add text."
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return RecipeError(
            f"{wanted} is too small for this text, whose characters and bytes alone need {int(least[1]):,}. "
            f"Raise it (and model.vocab_size)."
        )
    return error
