"""Trains a SentencePiece vocabulary on documents, with Llama 2's settings."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import sentencepiece

from services.common.errors import MillraceError, RecipeError

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


def take_first(documents: Iterable[bytes | memoryview], max_bytes: int) -> Iterator[bytes]:
    """Yield the first `max_bytes` of text. The last document is cut between two characters."""
    for document in documents:
        yield bytes(document[:max_bytes]).decode("utf-8", "ignore").encode()
        max_bytes -= len(document)
        if max_bytes <= 0:
            return


def train_vocabulary(documents: Iterable[bytes], vocab_size: int) -> bytes:
    """Train a SentencePiece BPE model on documents. The same documents give the same bytes.

    Raises `RecipeError` when the text is too small for `vocab_size` pieces, or has more characters than that.
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
        # C++ calls `read_lines`. If Python ended during such a call, the process would abort (SIGABRT).
        is_abandoned.set()
        is_done.wait(1)
    if failures:
        raise _explain_failure(failures[0], vocab_size) from failures[0]
    return model.getvalue()


def _read_lines(documents: Iterable[bytes]) -> Iterator[str]:
    for document in documents:
        for line in document.decode().replace(_RESERVED_CHARACTER, "\n").split("\n"):
            for begin in range(0, len(line), _LINE_CHARACTERS):
                yield line[begin : begin + _LINE_CHARACTERS]


def _explain_failure(error: RuntimeError, vocab_size: int) -> MillraceError | RuntimeError:
    message = str(error)
    wanted = f"tokenizer.train.vocab_size {vocab_size:,}"
    if most := re.search(r"set it to a value <= (\d+)", message):
        return RecipeError(
            f"{wanted} is too large for this text, which gives at most {int(most[1]):,} pieces. "
            f"Lower it and model.vocab_size, or add text."
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return RecipeError(
            f"{wanted} is too small for this text, whose characters and bytes need {int(least[1]):,} pieces. "
            f"Raise it and model.vocab_size."
        )
    return error
