"""`corpus.duplicates = "drop"` keeps the first of equal documents, as a set of all earlier documents does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.common.testing.seeds import draw_seed
from services.tokenizer.document_hashes import normalise
from services.tokenizer.duplicates import find_duplicates
from services.tokenizer.tasks import map_array
from services.tokenizer.tests.builders import (
    Mix,
    decode_documents,
    make_documents,
    make_text,
    publish,
    run,
    stop,
    write_documents,
    write_recipe,
)

LEAST_BYTES = 3
TEXTS = [b"", b" ", b"\n", b"ab", b" a ", b"a\xff", b"a\xef\xbf\xbd", b"one\r\ntwo\r", b"one\ntwo", b" one\ntwo\n\n"]
TEXTS += [make_text(10 + seed, seed=seed).strip() for seed in range(40)]
FIND_DUPLICATES = "services.tokenizer.build.find_duplicates"


@pytest.mark.parametrize(
    ("document", "other", "are_equal"),
    [
        (b"a b", b"\n\t a b\r\n \x0b\x0c", True),
        (b"a\r\nb\rc", b"a\nb\nc", True),
        (b" \n", b"", True),
        (b"a b", b"a  b", False),
        (b"a b", b"A b", False),
        (b"a b", b"a b.", False),
        (b"a", "a\u00a0".encode(), False),
        ("é".encode(), "e\u0301".encode(), False),
    ],
)
def test_only_line_ends_and_white_space_at_the_ends_may_differ(document: bytes, other: bytes, are_equal: bool) -> None:
    assert (normalise(document) == normalise(other)) is are_equal


def find_first_ones(documents: Sequence[bytes]) -> list[bytes]:
    """Return the first of all documents with equal normalised bytes, by a set."""
    first: dict[bytes, bytes] = {}
    for document in documents:
        first.setdefault(normalise(document), document)
    return list(first.values())


def test_any_partitions_groups_buckets_and_processes_keep_what_a_set_keeps(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(draw_seed())
    stored = [chosen.choice(TEXTS) + chosen.choice([b"", b"", b"\n", b" \r\n"]) for _ in range(150)]
    sources = write_documents(tmp_path / "left", stored[:90]), write_documents(tmp_path / "right", stored[90:])
    made = []
    for split_bytes, workers, digests_per_bucket, max_groups in (
        (10**9, 1, 2**23, 4_096),
        (1, 2, 7, 4),
        (100, 1, 1, 1),
    ):
        find = partial(find_duplicates, digests_per_bucket=digests_per_bucket, max_groups=max_groups)
        monkeypatch.setattr(FIND_DUPLICATES, find)
        recipe = write_recipe(
            tmp_path,
            *sources,
            model=model,
            corpus__duplicates="drop",
            corpus__min_document_bytes=LEAST_BYTES,
            corpus__split_bytes=split_bytes,
            corpus__validation_fraction=0.3,
            tokenizer__num_workers=workers,
        )
        made.append(publish(recipe, tmp_path / f"fsx-{split_bytes}"))

    corpus = made[0].manifest.corpus
    train, validation = (decode_documents(made[0].path, split) for split in ("train", "validation"))
    documents = [document.decode(errors="replace").encode() for document in stored]
    documents = [document for document in documents if len(document) >= LEAST_BYTES]
    kept = find_first_ones(documents)
    assert train == [document for document in kept if document not in validation]
    assert validation == [document for document in kept if document in validation]
    assert len(validation) > 3
    assert corpus.documents_duplicate == len(documents) - len(kept) > 60
    assert {each.manifest.content_digest for each in made} == {made[0].manifest.content_digest}
    assert [each.manifest.corpus.sources for each in made] == [corpus.sources] * len(made)


def test_a_repeated_command_runs_the_tasks_alone_whose_file_is_damaged(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped command leaves some files, and their tasks are not run again."""
    text = write_documents(tmp_path / "text", [b"text %d" % (number % 20) for number in range(40)])
    recipe = write_recipe(tmp_path, text, model=model, corpus__duplicates="drop", corpus__split_bytes=50)
    monkeypatch.setattr(FIND_DUPLICATES, partial(find_duplicates, digests_per_bucket=10))
    with monkeypatch.context() as patch:
        patch.setattr("services.tokenizer.build.pack_splits", stop)
        assert run(recipe, tmp_path / "fsx") == 75
        kinds = ("digests", "bucket", "duplicates")
        files = sorted(each for kind in kinds for each in tmp_path.rglob(f"000/*.{kind}*"))
        before = [path.stat().st_ino for path in files]
        assert {path.suffix for path in files} == {".digests", ".bucket", ".duplicates", ".json"}

        damaged = [next(path for path in files if path.suffix == f".{kind}" and path.stat().st_size) for kind in kinds]
        for path in damaged:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        assert run(recipe, tmp_path / "fsx") == 75

    after = [path.stat().st_ino for path in files]
    made_again = {path for path, old, new in zip(files, before, after, strict=True) if old != new}
    assert made_again == {*damaged, *(path.with_name(f"{path.name}.json") for path in damaged)}
    assert decode_documents(publish(recipe, tmp_path / "fsx").path, "train") == [
        b"text %d" % each for each in range(20)
    ]


def test_the_first_source_keeps_a_document_and_every_pass_drops_the_same(mix: Mix) -> None:
    x, y, z, w = make_documents(4)
    settings = {"corpus__duplicates": "drop", "corpus__split_bytes": 1_000}

    corpus = mix(([x, y, x, z + b"\n"], 2), ([b"\r\n" + y, w, z], 1), **settings)

    assert decode_documents(corpus.path, "train") == [x, y, z + b"\n", w, x, y, z + b"\n"]
    counts = corpus.manifest.corpus
    assert (counts.documents_read, counts.documents_duplicate, counts.documents_repeated) == (4 + 3, 1 + 2, 3)
    assert [source.documents_duplicate for source in counts.sources] == [1, 2]
    assert "duplicates" in {phase.name for phase in counts.phases}


def test_short_documents_go_before_duplicates_and_weights_choose_after_them(mix: Mix) -> None:
    """A document that is too short is no original of a longer one, and a duplicate cannot bring back what is left out.

    The limit counts bytes, not characters. Documents without a byte are counted as empty, however many there are.
    """
    shared = [document for document in make_documents(200, mean_bytes=60) if len(document) >= 20]
    accents = "é".encode() * 10
    sources = ([b"", b"", b"short", b"short", *shared], 0.5), ([b"short".center(20), b"short", accents, *shared], 1)

    corpus = mix(*sources, corpus__duplicates="drop", corpus__min_document_bytes=20)
    counts, kept = corpus.manifest.corpus, decode_documents(corpus.path, "train")

    assert kept == [document for document in [*shared, b"short".center(20), accents] if document in set(kept)]
    assert kept[-2:] == [b"short".center(20), accents]
    assert 0.3 * len(shared) < len(kept) < 0.7 * len(shared)
    assert (counts.documents_too_short, counts.documents_duplicate, counts.documents_empty) == (5, len(shared), 0)
    assert counts.documents_not_sampled == len(shared) + 2 - len(kept)

    counts = mix(*sources, corpus__duplicates="drop").manifest.corpus
    assert (counts.documents_too_short, counts.documents_empty) == (0, 2)
    assert counts.documents_duplicate == len(shared) + 3


def test_a_partition_is_looked_up_in_one_file_however_many_buckets_there_are(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def map_and_record(path: Path, dtype: Any) -> Any:
        opened.append(path)
        return map_array(path, dtype)

    text = write_documents(tmp_path / "text", [b"text %d" % (number % 20) for number in range(40)])
    settings = {"corpus__duplicates": "drop", "corpus__split_bytes": 50, "tokenizer__num_workers": 1}
    opens = []
    for digests_per_bucket in (2**23, 4):
        opened.clear()
        monkeypatch.setattr(FIND_DUPLICATES, partial(find_duplicates, digests_per_bucket=digests_per_bucket))
        monkeypatch.setattr("services.tokenizer.duplicates.map_array", map_and_record)
        publish(write_recipe(tmp_path, text, model=model, **settings), tmp_path / f"fsx-{digests_per_bucket}")
        opens.append(sum(path.suffix == ".duplicates" for path in opened))
    assert opens[0] == opens[1] > 0
