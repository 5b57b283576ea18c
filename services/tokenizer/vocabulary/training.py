"""Trains a SentencePiece vocabulary on documents, with Llama 2's settings."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import sentencepiece

from services.common.errors import RecipeError

# Llama 2's settings: text is not normalised, and byte pieces encode characters without a piece.
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
# SentencePiece uses this character for unknown pieces, and ignores lines of text that contain it.
_RESERVED_CHARACTER = "\u2585"
_LOG_ERRORS_ONLY = 2
# What SentencePiece says of too many pieces, of too few, and of blank text: the other errors are no fault of a recipe.
_DOES_NOT_FIT = ("set it to a value <=", "required_chars", "!sentences_.empty()")


def take_first(documents: Iterable[bytes | memoryview], max_bytes: int) -> Iterator[bytes]:
    """Yield the first `max_bytes` of text. The last document is cut between two characters."""
    for document in documents:
        yield bytes(document[:max_bytes]).decode("utf-8", "ignore").encode()
        max_bytes -= len(document)
        if max_bytes <= 0:
            return


def train_vocabulary(documents: Iterable[bytes], vocab_size: int) -> bytes:
    """Train a SentencePiece BPE model on documents. The same documents give the same bytes.

    Raises `RecipeError` when the text has too few words, or too many characters, for `vocab_size` pieces.
    """
    model = io.BytesIO()
    failures: list[RuntimeError] = []
    is_abandoned, is_done = threading.Event(), threading.Event()

    def train() -> None:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=takewhile(lambda _: not is_abandoned.is_set(), _read_lines(documents)),
                model_writer=model,
                vocab_size=vocab_size,
                max_sentence_length=_LINE_BYTES,
                num_threads=1,  # the model's bytes depend on the number of threads
                minloglevel=_LOG_ERRORS_ONLY,
                **_LLAMA2_SETTINGS,
            )
        except RuntimeError as error:
            failures.append(error)
        finally:
            is_done.set()

    # C++ trains for minutes on a large text. It runs in a thread, so that this one handles Ctrl-C and SIGTERM.
    threading.Thread(target=train, name="train-vocabulary", daemon=True).start()
    try:
        # No join(): in Python 3.11 a join that a signal interrupts marks the running thread as ended.
        while not is_done.wait(0.1):
            pass
    finally:
        # C++ takes the lines. If Python ended during such a call, the process would abort (SIGABRT).
        is_abandoned.set()
        is_done.wait(1)
    if failures:
        if not any(text in str(failures[0]) for text in _DOES_NOT_FIT):
            raise failures[0]
        raise RecipeError(
            f"tokenizer.train.vocab_size {vocab_size:,} does not fit this text. Change it and model.vocab_size, or add "
            f"text. SentencePiece: {failures[0]}"
        ) from failures[0]
    return model.getvalue()


def _read_lines(documents: Iterable[bytes]) -> Iterator[str]:
    for document in documents:
        for line in document.decode().replace(_RESERVED_CHARACTER, "\n").split("\n"):
            for begin in range(0, len(line), _LINE_CHARACTERS):
                yield line[begin : begin + _LINE_CHARACTERS]
