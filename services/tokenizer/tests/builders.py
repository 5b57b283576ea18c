"""Makes small inputs and recipes, runs the stage, and reads its corpora."""

from __future__ import annotations

import http.server
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import sentencepiece

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.store import Artifact, open_artifact
from services.common.errors import TryAgain
from services.common.launch import inline
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Recipe, Source, Tokenizer
from services.common.testing import recipes
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.__main__ import main
from services.tokenizer.corpus_inputs import list_corpus_inputs
from services.tokenizer.encoding.encoder_choice import ReferenceEncoder
from services.tokenizer.partition_plan import PlanFolder, plan_partitions
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.vocabulary.provision import describe_vocabulary
from services.tokenizer.vocabulary.training import train_vocabulary

REPOSITORY = Path(__file__).parents[3]
GivenSource = str | Path | dict[str, Any]
Mix = Callable[..., Artifact[CorpusManifest]]
"""The fixture `mix`."""
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


def write_recipe(folder: Path, *sources: GivenSource, model: Path | None = None, **changes: Any) -> Path:
    """Write a recipe with these sources: addresses, or keys such as `{"uri": "a", "weight": 2}`.

    `model` is a vocabulary that `write_model` has written. `corpus__split_bytes=1` sets a key.
    """
    tables = [source if isinstance(source, dict) else {"uri": str(source)} for source in sources]
    if model:
        changes = {"tokenizer__model": str(model), "model__vocab_size": PIECES} | changes
    settings = SMALL | {"corpus__sources": tables} | changes
    if "tokenizer__model" in changes:
        settings["tokenizer__train"] = None
    return recipes.write_recipe(folder, **settings)


def write_model(folder: Path) -> Path:
    """Write a SentencePiece model of PIECES pieces that is trained on generated documents."""
    path = folder / "given.model"
    path.write_bytes(train_vocabulary(make_documents(60), PIECES))
    return path


def load_reference(vocabulary: bytes) -> ReferenceEncoder:
    """Load the library that defines the ids of a vocabulary's file."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(vocabulary)
        return ReferenceEncoder(Path(file.name), describe_vocabulary(vocabulary, Tokenizer(model="given")))


def pieces_of(model: bytes) -> list[str]:
    """List the pieces of a SentencePiece model by their ids."""
    processor = load_model(model)
    return [str(processor.id_to_piece(index)) for index in range(processor.vocab_size())]


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


def publish(recipe: Path, root: Path, *arguments: str) -> Artifact[CorpusManifest]:
    """Run the stage in this process, and open the only corpus below `root`."""
    assert run(recipe, root, *arguments) == 0
    return published(root)


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


def publish_documents(folder: Path, documents: Sequence[bytes], **settings: Any) -> Artifact[CorpusManifest]:
    """Make a corpus below `folder` of documents in .txt files, with settings as in `write_recipe`."""
    return publish(write_recipe(folder, write_documents(folder / "text", documents), **settings), folder / "fsx")


def write_plan(folder: Path, recipe: Recipe) -> PlanFolder:
    return plan_partitions(folder, recipe, list_corpus_inputs(recipe).listings, inline)


def stop(*arguments: object) -> None:
    """Stands for `pack_splits` in a command that is stopped when all partitions are encoded."""
    raise TryAgain("stopped after all partitions were encoded")


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


DOCUMENTS = ["first\r\nline", "", " ", "nul\0", "emoji 👍🏽", "e\u0301", '" and \\ and \u2028 and \x85 breaks', "last"]
DOCUMENTS += [document.decode() for document in make_documents(140, mean_bytes=60)]


TEXTS = [document.decode() for document in make_documents(60)]
ARTICLE = '<doc id="12" title="%s" nonfiltered="1" processed="1" dbindex="0">\n%s\n\nENDOFARTICLE.\n</doc>\n'


def read_all(
    source: Source,
    split_bytes: int = 10**9,
    *,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    invalid_utf8: str = "reject",
    bad_rows: BadRows | None = None,
) -> list[str]:
    """Return the documents of a source as the tasks of the stage read them."""
    pieces = [piece for file in list_inputs(source) for piece in cut_file(file, split_bytes)]
    return [
        document.decode()
        for batch in read_documents(pieces, invalid_utf8, max_document_bytes, bad_rows)
        for document in batch.documents()
    ]


def jsonl(texts: Sequence[object]) -> bytes:
    return b"".join(
        json.dumps({"text": text.decode() if isinstance(text, bytes) else text}).encode() + b"\n" for text in texts
    )


def write_jsonl(path: Path, texts: Sequence[str | bytes]) -> Path:
    path.write_bytes(jsonl(texts))
    return path


def write_table(path: Path, table: pa.Table, writer: Callable[..., Any], rows: int = 20) -> None:
    """Write record batches or row groups of so many rows with `pa.ipc.new_file`, `new_stream` or `pq.ParquetWriter`."""
    with writer(str(path), table.schema) as file:
        file.write_table(table, rows)


def compress_with_arrow(content: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def make_wikicorpus(*members: str, mode: str = "w:gz") -> bytes:
    """Make an archive of files in latin-1 as Wikicorpus has them, of texts of ARTICLEs."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as made:  # type: ignore[call-overload]
        for number, text in enumerate(members):
            entry = tarfile.TarInfo(f"raw.en/englishText_{number}")
            entry.size = len(text.encode("latin-1"))
            made.addfile(entry, io.BytesIO(text.encode("latin-1")))
    return sink.getvalue()


class Stage:
    """Runs the stage with a given vocabulary, so that errors come from the sources."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.root = folder, folder / "fsx"
        self._model, self._capsys = model, capsys

    def run(self, *sources: GivenSource, **settings: Any) -> int:
        recipe = write_recipe(self.folder, *sources, model=self._model, **settings)
        self._capsys.readouterr()
        return run(recipe, self.root)

    def refuse(self, exit_code: int, *sources: GivenSource, **settings: Any) -> str:
        """Run the stage, check that it publishes nothing and ends with `exit_code`, and return its error message."""
        assert self.run(*sources, **settings) == exit_code
        assert not is_anything_published(self.root)
        errors = self._capsys.readouterr().err
        assert errors.count("millrace: ") == 1
        assert "Traceback" not in errors
        return errors[errors.index("millrace: ") :]


@contextmanager
def serve(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a web server on loopback during the block, and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
