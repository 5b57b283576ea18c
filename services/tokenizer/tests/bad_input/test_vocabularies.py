"""Files that are no vocabulary are refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from services.common.errors import ArtifactError
from services.common.recipe.schema import Tokenizer
from services.tokenizer.vocabulary.description import describe_vocabulary

BORDERS = [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]
CLASSES = [{"id": 1, "content": "[CLS]"}, {"id": 2, "content": "[SEP]"}]


def write_json(model: object, added_tokens: object = ()) -> Callable[[bytes], bytes]:
    return lambda _: json.dumps({"model": model, "added_tokens": added_tokens}).encode()


def write_tiktoken(ranks: Sequence[int], size: int | None = None) -> Callable[[bytes], bytes]:
    lines = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % rank for byte, rank in enumerate(ranks))
    return lambda _: lines[:size]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: b"", "SentencePiece"),
        (lambda model: model[:1], "SentencePiece"),
        (lambda model: model[: len(model) // 2], "SentencePiece"),
        (lambda model: model[:-1], "SentencePiece"),
        (lambda model: b'{"model": {"vocab": {"a": 0, "b"', "JSON"),
        (write_json({}), "vocab"),
        (write_json({"vocab": {"a": "x"}}), "TypeError"),
        (write_json({"vocab": {"a": 0}}, [{"id": 1}]), "content"),
        (write_json({"vocab": {}}), "tokenizer.bos_token"),
        (write_json({"vocab": {"a": 0}}, BORDERS), "tokenizers "),
        (write_json({"vocab": {"a": 0}}, CLASSES), r"\[CLS\], \[SEP\]"),
        (write_tiktoken([rank + (rank > 100) for rank in range(256)]), "rank"),
        (write_tiktoken(range(256), size=-3), "tiktoken"),
        (write_tiktoken(range(200)), "byte"),
        (write_tiktoken([0, 1, 1, *range(3, 256)]), "rank"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(model: Path, change: Callable[[bytes], bytes], named: str) -> None:
    settings = Tokenizer(model="given", bos_token="[CLS]", eos_token="[END]") if "CLS" in named else Tokenizer(model="")
    with pytest.raises(ArtifactError, match=named):
        describe_vocabulary(change(model.read_bytes()), settings)
