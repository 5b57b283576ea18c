"""Makes small inputs and recipes, runs the stage, and reads its corpora."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sentencepiece

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.store import Artifact, open_artifact
from services.common.process.entry_point import exit_code_of
from services.common.testing import recipes
from services.tokenizer.__main__ import main
from services.tokenizer.vocabulary.training import train_vocabulary

REPOSITORY = Path(__file__).parents[3]
VOCAB_SIZE = 400
PIECES = 300
"""Pieces of the vocabulary that `write_model` writes."""
MAX_DOCUMENT_BYTES = 128 * 2**20
"""The default of `corpus.max_document_bytes`."""
_WORDS = (
    *("the", "stream", "of", "tokens", "continues", "in", "every", "row", "while", "nothing", "gets", "lost"),
    *("shards", "follow", "documents", "because", "training", "needs", "whole", "sequences", "and", "their", "targets"),
)


SMALL: dict[str, Any] = {
    "name": "test",
    "corpus__name": "test",
    "corpus__rows_per_shard": 64,
    "corpus__validation_fraction": 0.0,
    "tokenizer__train__vocab_size": VOCAB_SIZE,
    "tokenizer__train__max_bytes": 200_000,
    "model__vocab_size": VOCAB_SIZE,
}


def write_recipe(folder: Path, *uris: str | Path, sources: str = "", **changes: Any) -> Path:
    """Write a recipe with sources `uris` or literal `[[corpus.sources]]` tables. `corpus__split_bytes=1` sets a key."""
    settings = SMALL | changes | {"corpus__sources": None if sources else [{"uri": str(uri)} for uri in uris]}
    if "tokenizer__model" in changes:
        settings["tokenizer__train"] = None
    path = recipes.write_recipe(folder, **settings)
    path.write_text(path.read_text(encoding="utf-8") + sources, encoding="utf-8")
    return path


def write_model(folder: Path) -> Path:
    """Write a SentencePiece model of PIECES pieces that is trained on generated documents."""
    path = folder / "given.model"
    path.write_bytes(train_vocabulary(make_documents(60), PIECES))
    return path


def write_documents(folder: Path, documents: Sequence[bytes]) -> Path:
    """Write every document to a .txt file."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, document in enumerate(documents):
        (folder / f"{index:05d}.txt").write_bytes(document)
    return folder


def make_documents(count: int, *, mean_bytes: int = 400, seed: int = 0) -> list[bytes]:
    """Make distinct documents of random lengths."""
    chosen = random.Random(seed)
    return [make_text(chosen.randint(1, 2 * mean_bytes), seed=seed * 1_000_003 + index) for index in range(count)]


def make_text(size: int, *, seed: int = 0) -> bytes:
    """Make `size` bytes of words, numbers and line ends. Equal seeds give equal text."""
    chosen = random.Random(seed)
    parts: list[str] = [f"{seed} "]
    length = len(parts[0])
    while length < size:
        part = chosen.choice(_WORDS) + chosen.choice([" ", " ", " ", ", ", ".\n", f" {chosen.randrange(10**6)} "])
        parts.append(part)
        length += len(part)
    return "".join(parts).encode()[:size]


def run(recipe: Path, root: Path, *arguments: str) -> int:
    """Run the stage in this process without Ray, and return its exit code."""
    return exit_code_of(lambda: main(["--recipe", str(recipe), "--root", str(root), "--launch", "inline", *arguments]))


@dataclass(frozen=True)
class ToolResult:
    """The exit code and the output of a command."""

    exit_code: int
    output: str
    errors: str

    def value(self, name: str) -> str:
        """The text after `name` on its line of the output."""
        return re.search(rf"^ *{name} +(.*)$", self.output, re.MULTILINE)[1]  # type: ignore[index]


Tool = Callable[..., ToolResult]


def start(recipe: Path, root: Path, *arguments: str, launch: str = "inline") -> subprocess.Popen[str]:
    """Start the stage in its own process, as a user does."""
    command = [sys.executable, "-m", "services.tokenizer", "--recipe", str(recipe), "--root", str(root)]
    return subprocess.Popen(
        [*command, "--launch", launch, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )


def published(root: Path) -> Artifact[CorpusManifest]:
    """Open the only corpus below `root`."""
    manifests = [path for path in root.glob("corpus/*/*/manifest.json") if ".partial" not in path.parent.name]
    assert len(manifests) == 1, manifests
    return open_artifact(manifests[0].parent, CorpusManifest)


def is_anything_published(root: Path) -> bool:
    return any(".partial" not in path.parent.name for path in root.glob("corpus/*/*/manifest.json"))


@dataclass(frozen=True)
class StoredStream:
    """The tokens of a split and the positions where documents begin, read by pyarrow alone."""

    tokens: npt.NDArray[np.int64]
    starts: list[int]

    @property
    def documents(self) -> list[list[int]]:
        return [
            self.tokens[begin:end].tolist()
            for begin, end in zip(self.starts, [*self.starts[1:], len(self.tokens)], strict=True)
        ]


def read_stream(folder: Path, split: Split) -> StoredStream:
    tokens: list[npt.NDArray[np.int64]] = []
    starts: list[int] = []
    num_tokens = 0
    for path in [*sorted((folder / split).glob("*.arrow")), folder / split / "tail" / "tail.arrow"]:
        rows = pa.ipc.open_file(str(path)).read_all()
        for ids, doc_starts in zip(rows["input_ids"], rows["doc_starts"].to_pylist(), strict=True):
            tokens.append(ids.values.to_numpy().astype(np.int64))
            starts += [num_tokens + position for position in doc_starts]
            num_tokens += len(ids)
    return StoredStream(np.concatenate(tokens), starts)


def decode_documents(folder: Path, split: Split) -> list[bytes]:
    """Decode all documents of a split with SentencePiece, without BOS and EOS."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer" / "tokenizer.model"))
    documents = read_stream(folder, split).documents
    assert all(ids[0] == model.bos_id() and ids[-1] == model.eos_id() for ids in documents)
    return [str(model.decode(ids[1:-1])).encode() for ids in documents]
