"""Training a SentencePiece vocabulary on documents, with Llama 2's settings."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import sentencepiece

from services.common.errors import MillraceError, RecipeError

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


def take_first(documents: Iterable[bytes | memoryview], max_bytes: int) -> Iterator[bytes]:
    """The first so many bytes of text; the document at the end is cut, between two characters."""
    for document in documents:
        yield bytes(document[:max_bytes]).decode("utf-8", "ignore").encode()
        max_bytes -= len(document)
        if max_bytes <= 0:
            return


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
            f"{wanted} is too large for this text, which has pieces for {int(most[1]):,} at most. "
            f"Lower it (and model.vocab_size), or add text."
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return RecipeError(
            f"{wanted} is too small for this text, whose characters and bytes alone need {int(least[1]):,}. "
            f"Raise it (and model.vocab_size)."
        )
    return error
