"""Corpora for the tests of the tools, what damages them, and what a tool has said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.tokenizer.tests.builders import VOCAB_SIZE, published, run, write_documents, write_recipe

SPECIAL = "größe </s> <s> 漢字 and 🎉".encode()
MODEL = "tokenizer/tokenizer.model"


@dataclass(frozen=True)
class Said:
    exit_code: int
    output: str
    errors: str

    def value(self, name: str) -> str:
        """What follows `name` on its line."""
        return re.search(rf"^ *{name} +(.*)$", self.output, re.MULTILINE)[1]  # type: ignore[index]


Tool = Callable[..., Said]


def make_corpus(folder: Path, documents: list[bytes], **overrides: Any) -> Artifact[CorpusManifest]:
    folder.mkdir(exist_ok=True)
    text = write_documents(folder / "text", documents)
    assert run(write_recipe(folder, text, **overrides), folder / "fsx") == 0
    return published(folder / "fsx")


def write_tokenizer_json(path: Path, documents: list[bytes], *special: str, unused: int = 0) -> Path:
    """A byte-level BPE of VOCAB_SIZE tokens, and of some that no text has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([document.decode() for document in documents], trainer)
    fields = json.loads(tokenizer.to_str())
    fields["model"]["vocab"] |= {f"unused{index}": VOCAB_SIZE + index for index in range(unused)}
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def lose_a_document(shard: Path) -> None:
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts").to_pylist()
    row = next(index for index, each in reversed(list(enumerate(starts))) if each)
    starts[row] = starts[row][:-1]
    rewritten = pa.record_batch(
        [batch.column("input_ids"), pa.array(starts, batch.schema.field("doc_starts").type)], schema=batch.schema
    )
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(rewritten)


def flip_a_token(shard: Path, position: int, token: int) -> None:
    """Rewrite one token, as a failing disk does: the size stays."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    tokens = batch.column("input_ids").values.to_numpy().copy()
    tokens[position] = token
    stored = pa.FixedSizeListArray.from_arrays(pa.array(tokens), type=batch.schema.field("input_ids").type)
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(pa.record_batch([stored, batch.column("doc_starts")], schema=batch.schema))
