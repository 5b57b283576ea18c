"""A corpus without exact duplicates: `corpus.duplicates = "drop"`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.common.artifacts.corpus import CorpusManifest, CorpusPayload
from services.common.testing.seeds import draw_seed
from services.tokenizer.document_hashes import normalise
from services.tokenizer.tests.builders import (
    PIECES,
    decode_documents,
    make_documents,
    make_text,
    published,
    run,
    write_recipe,
)


class Text:
    """Sources of documents with weights, and a recipe that drops their exact duplicates."""

    def __init__(self, folder: Path, model: Path | None, *sources: tuple[Sequence[bytes], float]) -> None:
        self._folder, self._model, self._tables = folder, model, ""
        for number, (documents, weight) in enumerate(sources):
            path = folder / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"text": document.decode()}) + "\n" for document in documents))
            self._tables += f'[[corpus.sources]]\nuri = "{path}"\nweight = {weight}\n'

    def write_recipe(self, **settings: object) -> Path:
        given = {"tokenizer__model": str(self._model), "model__vocab_size": PIECES} if self._model else {}
        return write_recipe(self._folder, sources=self._tables, corpus__duplicates="drop", **given | settings)

    def publish(self, name: str, **settings: object) -> tuple[Path, CorpusManifest]:
        root = self._folder / name
        assert run(self.write_recipe(**settings), root) == 0
        corpus = published(root)
        return corpus.path, corpus.manifest


def find_first_ones(documents: Sequence[bytes]) -> list[bytes]:
    """Return the first of all documents with equal normalised bytes, by a set."""
    first: dict[bytes, bytes] = {}
    for document in documents:
        first.setdefault(normalise(document), document)
    return list(first.values())


def make_repeated(chosen: random.Random, count: int) -> list[bytes]:
    """Draw documents of few texts, with other line ends and white space around some."""
    texts = [make_text(chosen.randint(10, 60), seed=seed).strip() for seed in range(count // 3)]
    return [chosen.choice(texts) + chosen.choice([b"", b"", b"\n", b" \r\n"]) for _ in range(count)]


def test_the_first_source_keeps_a_document_and_every_pass_drops_the_same(tmp_path: Path, model: Path) -> None:
    x, y, z, w = make_documents(4)
    text = Text(tmp_path, model, ([x, y, x, z + b"\n"], 2), ([b"\r\n" + y, w, z], 1))

    path, manifest = text.publish("fsx", corpus__split_bytes=1_000)

    assert decode_documents(path, "train") == [x, y, z + b"\n", w, x, y, z + b"\n"]
    assert manifest.corpus.documents_read == 2 * 4 + 3
    assert [source.documents_duplicate for source in manifest.corpus.sources] == [2, 2]
    assert "duplicates" in {phase.name for phase in manifest.corpus.phases}


@pytest.mark.parametrize("runs", [((10**9, 1), (1_000, 2)), pytest.param(((10**9, 1), (1, 4)), marks=pytest.mark.slow)])
def test_any_partitions_and_processes_keep_what_a_set_keeps(
    tmp_path: Path, model: Path, runs: Sequence[tuple[int, int]]
) -> None:
    chosen = random.Random(draw_seed())
    left, right = make_repeated(chosen, 90), make_repeated(chosen, 60)
    text = Text(tmp_path, model, (left, 1), (right, 1))

    made = [
        text.publish(f"{split_bytes}", corpus__split_bytes=split_bytes, corpus__validation_fraction=0.3,
                     tokenizer__num_workers=workers)
        for split_bytes, workers in runs
    ]  # fmt: skip

    path, manifest = made[0]
    train, validation = decode_documents(path, "train"), decode_documents(path, "validation")
    kept = find_first_ones(left + right)
    assert train == [document for document in kept if document not in validation]
    assert validation == [document for document in kept if document in validation]
    assert len(validation) > 3
    assert manifest.corpus.documents_duplicate == len(left + right) - len(kept) > 80
    assert {each.content_digest for _, each in made} == {manifest.content_digest}
    assert [each.corpus.sources for _, each in made[1:]] == [manifest.corpus.sources] * (len(runs) - 1)


def test_short_documents_go_before_duplicates_and_weights_choose_after_them(tmp_path: Path, model: Path) -> None:
    """A document that is too short is no original of a longer one, and a duplicate cannot bring back what is left out.

    Documents without a byte are counted as empty, however many there are.
    """
    shared = make_documents(200, mean_bytes=60)
    shared = [document for document in shared if len(document) >= 20]
    left = [b"", b"", b"short", b"short", *shared]
    right = [b"short".center(20), b"short", *shared]
    text = Text(tmp_path, model, (left, 0.5), (right, 1))

    path, manifest = text.publish("fsx", corpus__min_document_bytes=20)
    counts, kept = manifest.corpus, decode_documents(path, "train")

    assert kept == [document for document in [*shared, b"short".center(20)] if document in set(kept)]
    assert kept[-1] == b"short".center(20)
    assert 0.3 * len(shared) < len(kept) < 0.7 * len(shared)
    assert (counts.documents_too_short, counts.documents_duplicate, counts.documents_empty) == (5, len(shared), 0)
    assert counts.documents_not_sampled == len(shared) + 1 - len(kept)

    counts = text.publish("other")[1].corpus
    assert (counts.documents_too_short, counts.documents_empty) == (0, 2)
    assert counts.documents_duplicate == len(shared) + 3


def test_repaired_documents_are_compared_as_they_are_stored(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate([b"caf\xe9 au lait " * 9, "caf\ufffd au lait ".encode() * 9, b"caf\xe8"]):
        (folder / f"{number}.txt").write_bytes(document)
    recipe = write_recipe(
        tmp_path, folder, tokenizer__model=str(model), model__vocab_size=PIECES, corpus__duplicates="drop"
    )
    assert run(recipe, tmp_path / "fsx") == 0

    counts = published(tmp_path / "fsx").manifest.corpus
    assert (counts.documents_read, counts.documents_duplicate, counts.documents_with_invalid_utf8) == (3, 1, 2)


@pytest.mark.parametrize(("field", "change"), [("documents_duplicate", 1), ("documents_read", 1)])
def test_a_manifest_that_has_lost_a_document_is_refused(tmp_path: Path, model: Path, field: str, change: int) -> None:
    documents = make_documents(5)
    payload = Text(tmp_path, model, (documents * 2, 1)).publish("fsx")[1].corpus
    changed = payload.model_dump() | {field: getattr(payload, field) + change}

    with pytest.raises(ValidationError, match=r"dropped|duplicates"):
        CorpusPayload.model_validate(changed)
