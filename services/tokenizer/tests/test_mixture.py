"""Corpora of several sources: weights choose documents, and the manifest has every source's share."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
import sentencepiece

from services.common.artifacts.corpus import SPLITS
from services.tokenizer.tests.builders import Mix, decode_documents, make_documents, make_text, read_stream


def make_short(number: int, *, seed: int) -> list[bytes]:
    return [b"%d of %d: " % (index, seed) + make_text(30, seed=seed * 10_000 + index) for index in range(number)]


def test_a_quarter_takes_about_a_quarter_and_the_same_ones_each_time(mix: Mix) -> None:
    documents = make_short(2_000, seed=1)

    made = [mix((documents, 0.25)), mix((documents, 0.25), corpus__split_bytes=5_000)]

    assert len({corpus.manifest.content_digest for corpus in made}) == 1
    kept = decode_documents(made[0].path, "train")
    assert 500 - 3 * 20 < len(kept) < 500 + 3 * 20  # the standard deviation is 19.4
    chosen = set(kept)
    assert kept == [document for document in documents if document in chosen]
    counts = made[0].manifest.corpus
    assert (counts.documents_read, counts.documents_not_sampled) == (2_000, 2_000 - len(kept))


def test_two_and_a_half_takes_each_twice_and_half_once_more_after_all_sources(mix: Mix) -> None:
    """Copies of a document are far apart, so no training sequence holds two of them."""
    repeated, once = make_short(400, seed=1), make_short(50, seed=2)

    corpus = mix((repeated, 2.5), (once, 1), corpus__split_bytes=2_000)

    train = decode_documents(corpus.path, "train")
    first, second, third = train[:450], train[450:850], train[850:]
    assert first == repeated + once
    assert second == repeated
    assert 200 - 3 * 10 < len(third) < 200 + 3 * 10
    assert third == [document for document in repeated if document in set(third)]
    counts = corpus.manifest.corpus
    read = (counts.documents_read, counts.documents_not_sampled, counts.documents_repeated)
    assert read == (400 + 50, 0, 400 + len(third))
    assert [each.splits["train"].documents for each in counts.sources] == [800 + len(third), 50]


def test_mixtures_of_other_weights_have_the_same_validation_split(mix: Mix) -> None:
    """Losses of mixtures can be compared only on the same documents, token for token with a given vocabulary."""
    texts = [make_short(300, seed=1), make_documents(40, seed=2), make_documents(30, seed=3)]
    made = [
        mix(*zip(texts, weights, strict=True), corpus__validation_fraction=0.2, corpus__split_bytes=5_000)
        for weights in ([1, 1, 1], [0.1, 1, 2.5], [2.5, 0.1, 1])
    ]

    streams = [read_stream(corpus.path, "validation") for corpus in made]
    assert [each.documents for each in streams[1:]] == [streams[0].documents] * 2
    assert len(streams[0].documents) > 50
    payloads = [corpus.manifest.corpus for corpus in made]
    assert len({payload.validation_ranges for payload in payloads}) == 1
    assert all(payload.sources[0].splits["validation"].documents > 30 for payload in payloads)
    assert len({payload.splits["train"].documents for payload in payloads}) == 3
    for corpus in made:
        held_out = set(decode_documents(corpus.path, "validation"))
        assert not held_out & set(decode_documents(corpus.path, "train"))


def test_shares_add_up_and_are_those_of_the_shards(tmp_path: Path, mix: Mix, model: Path) -> None:
    texts = [make_short(200, seed=1), make_documents(30, seed=2), make_documents(20, seed=3)]
    weights = [0.5, 1, 2.25]
    corpus = mix(*zip(texts, weights, strict=True), corpus__validation_fraction=0.1, corpus__split_bytes=3_000)

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    source_of = {document: number for number, documents in enumerate(texts) for document in documents}
    documents = Counter[int]()
    counted = corpus.manifest.corpus.sources
    for split in SPLITS:
        found = {number: [0, 0, 0] for number in range(3)}
        order = []
        for ids in read_stream(corpus.path, split).documents:
            text = str(processor.decode(ids[1:-1])).encode()
            order.append(source_of[text])
            found[order[-1]] = [sum(pair) for pair in zip(found[order[-1]], (1, len(ids), len(text)), strict=True)]
        for number, (num_documents, num_tokens, text_bytes) in found.items():
            counts = counted[number].splits[split]
            assert (counts.documents, counts.tokens, counts.text_bytes) == (num_documents, num_tokens, text_bytes)
            documents[number] += num_documents
    assert order == sorted(order)  # the validation split holds one source after the other
    ends = list(accumulate(each.splits["validation"].tokens for each in counted))
    assert corpus.manifest.corpus.validation_ranges == tuple(map(range, [0, *ends], ends))
    assert documents[1] == 30  # each source has its own weight
    assert 70 < documents[0] < 130
    assert 30 < documents[2] < 60
    assert [each.uri for each in counted] == [str(tmp_path / f"{number}.jsonl") for number in range(3)]
    assert [each.weight for each in counted] == weights
    trained_on = [each.splits["train"].tokens for each in counted]
    assert [each.share for each in counted] == [tokens / sum(trained_on) for tokens in trained_on]
    assert sum(each.share for each in counted) == pytest.approx(1, abs=1e-12)


def test_a_document_of_two_sources_is_chosen_alike_in_both(mix: Mix) -> None:
    """The document is not removed, and is never in both splits."""
    shared, left, right = make_short(200, seed=1), make_short(100, seed=2), make_short(100, seed=3)

    corpus = mix((left + shared, 0.5), (shared + right, 0.5), corpus__validation_fraction=0.3)

    train, validation = (Counter(decode_documents(corpus.path, split)) for split in SPLITS)
    assert not set(train) & set(validation)
    kept = train + validation
    assert {kept[document] for document in shared} == {0, 2}
    assert {kept[document] for document in left + right} == {0, 1}
    assert 100 < sum(document in kept for document in shared) < 160
    assert any(document in validation for document in shared)
