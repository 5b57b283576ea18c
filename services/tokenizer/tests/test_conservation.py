"""No text is lost or changed between the sources and the shards."""

from __future__ import annotations

import codecs
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from services.common.artifacts.files import verify_files
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.tests.builders import (
    VOCAB_SIZE,
    decode_documents,
    load_reference,
    make_documents,
    make_text,
    publish_documents,
    read_stream,
)
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.training import train_vocabulary

NASTY = [
    b"",
    b"a",
    b" ",
    b"\n",
    b"\t",
    b"\0",
    b"   ",
    b"nul\0 in \0\0 text",
    b"dos\r\nlines\r\n\r\nmac\rlines\r",
    b"  leading and trailing  ",
    "👩‍👩‍👧 🇺🇳 👍🏽 emoji".encode(),
    "e\u0301 a\u0308\u0323 combining, é composed".encode(),
    "العربية עברית 中文 \U0002a6d6".encode(),
    "\ufeffbyte order mark".encode(),
    "lower five eighths \u2585 block".encode(),
    b"</s><s> <unk> <0x41> <pad>",
    b"",
    make_text(5_000_000, seed=1),
    b"z",
]


def test_every_byte_of_a_nasty_corpus_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = NASTY + make_documents(60)
    corpus = publish_documents(
        tmp_path,
        documents,
        corpus__validation_fraction=0.2,
        corpus__split_bytes=5_000,
        corpus__sequence_length=128,
        corpus__rows_per_shard=1_000,
    )

    verify_files(corpus.path, corpus.manifest)
    train, validation = decode_documents(corpus.path, "train"), decode_documents(corpus.path, "validation")
    kept = [document.removeprefix(codecs.BOM_UTF8) for document in documents if document]
    assert Counter(train) + Counter(validation) == Counter(kept)
    assert len(validation) > 5
    held_out = set(validation)
    assert train == [document for document in kept if document not in held_out]
    assert validation == [document for document in kept if document in held_out]
    payload = corpus.manifest.corpus
    assert (payload.documents_read, payload.documents_empty) == (len(documents), 2)
    assert payload.text_bytes == sum(map(len, kept))
    assert "2 empty documents dropped" in capsys.readouterr().out


def test_counts_say_where_every_token_is(tmp_path: Path) -> None:
    corpus = publish_documents(tmp_path, make_documents(30), corpus__validation_fraction=0.3)

    for split, counts in corpus.manifest.corpus.splits.items():
        stream = read_stream(corpus.path, split)
        assert counts.tokens == len(stream.tokens) == counts.rows * 16 + counts.tail_tokens
        assert counts.documents == counts.bos == counts.eos == len(stream.starts)
        assert counts.document_tokens == sum(len(document) - 2 for document in stream.documents)
        assert counts.tail_tokens < 16


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    documents = [b"good " * 40, b"latin-1 caf\xe9 text", b"cut off \xe2\x82", b"caf\xc3\xa9"]
    corpus = publish_documents(tmp_path, documents, tokenizer__train__vocab_size=300, model__vocab_size=300)

    expected = [documents[0], "latin-1 caf\ufffd text".encode(), "cut off \ufffd".encode(), "café".encode()]
    assert decode_documents(corpus.path, "train") == expected
    assert corpus.manifest.corpus.documents_with_invalid_utf8 == 2


def test_control_text_stays_text() -> None:
    """An author's `</s>` must not end a document."""
    encoder = load_reference(train_vocabulary(make_documents(50), VOCAB_SIZE))
    ids, offsets = encoder.encode(TextBatch.of([b"<s> </s> <unk>", b"<0x0A>"]))

    assert offsets.tolist() == [0, offsets[1], len(ids)]
    for begin, end in pairwise(offsets):
        assert (ids[begin], ids[end - 1]) == (1, 2)
        assert not np.isin(ids[begin + 1 : end - 1], [0, 1, 2]).any()


def test_documents_without_a_token_take_no_room() -> None:
    encoder = load_reference(train_vocabulary(make_documents(50), VOCAB_SIZE))
    ids, offsets = encoder.encode(TextBatch.of([b"", b"a", b"", b"b", b""]))

    lengths = np.diff(offsets)
    assert (lengths[[0, 2, 4]] == 0).all()
    assert lengths.sum() == len(ids) > 0
    assert encoder.encode(TextBatch.of([]))[1].tolist() == [0]


def test_a_vocabulary_above_65536_is_stored_in_32_bits(tmp_path: Path) -> None:
    """A cast to 16 bits would change ids without an error."""
    model = sentencepiece_model_pb2.ModelProto.FromString(  # type: ignore[attr-defined]
        train_vocabulary(make_documents(50), VOCAB_SIZE)
    )
    for index in range(66_000):
        model.pieces.add(piece=f"#{index}#", score=-1e6 - index)
    model.pieces.add(piece="€", score=-1e7)
    (tmp_path / "large.model").write_bytes(model.SerializeToString())
    settings = {"tokenizer__model": str(tmp_path / "large.model"), "model__vocab_size": len(model.pieces)}
    corpus = publish_documents(tmp_path, ["€ and more ".encode() * 20], **settings)

    assert corpus.manifest.corpus.token_dtype == "uint32"
    assert read_stream(corpus.path, "train").tokens.max() == len(model.pieces) - 1 > 2**16
    assert decode_documents(corpus.path, "train") == ["€ and more ".encode() * 20]
    assert [token_dtype(size) for size in (2, 2**16, 2**16 + 1)] == ["uint16", "uint16", "uint32"]


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    documents = make_documents(20) + [document for document in NASTY[:16] if document]
    corpus = publish_documents(tmp_path, documents)

    model = sentencepiece.SentencePieceProcessor(model_file=str(corpus.path / "tokenizer" / "tokenizer.model"))
    expected = [[model.bos_id(), *model.encode(document.decode("utf-8-sig")), model.eos_id()] for document in documents]
    assert read_stream(corpus.path, "train").documents == expected
