"""A vocabulary is given, or is trained on the training split with reproducible bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.split_assignment import are_for_validation
from services.tokenizer.tests.builders import (
    VOCAB_SIZE,
    make_documents,
    make_text,
    published,
    run,
    write_documents,
    write_recipe,
)
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.training import train_vocabulary


def pieces_of(model: bytes) -> list[str]:
    processor = load_model(model)
    return [str(processor.id_to_piece(index)) for index in range(processor.vocab_size())]


def test_a_trained_vocabulary_has_llama2s_settings() -> None:
    model = load_model(
        train_vocabulary([*make_documents(60), b"1234567890 " * 200, b"        indented\n" * 50], VOCAB_SIZE)
    )

    assert model.vocab_size() == VOCAB_SIZE
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, -1)
    assert sum(model.is_byte(index) for index in range(VOCAB_SIZE)) == 256
    assert len(model.encode("123456", out_type=str)) == 7
    assert "▁▁▁▁" in pieces_of(model.serialized_model_proto())
    assert model.decode(model.encode("  \ufb01 ½ Å\r\n")) == "  \ufb01 ½ Å\r\n"


def test_the_same_text_gives_the_same_bytes() -> None:
    documents = make_documents(60)
    assert train_vocabulary(documents, VOCAB_SIZE) == train_vocabulary(documents, VOCAB_SIZE)


@pytest.mark.parametrize("line", [b"xylophone " * 500_000, b"\xe2\x96\x85 xylophone \xe2\x96\x85", b"\0 xylophone \0"])
def test_no_line_is_left_out(line: bytes) -> None:
    """SentencePiece ignores long lines, and lines with a certain character, without a message."""
    documents = [*make_documents(60), *[line] * (1 if len(line) > 1_000 else 200)]
    assert "xylophone" in "".join(pieces_of(train_vocabulary(documents, VOCAB_SIZE))).replace("▁", "")


def test_validation_text_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    candidates = [f"{'qwertz ' * 200}{index}".encode() for index in range(100)]
    held_out = candidates[int(np.argmax(are_for_validation(TextBatch.of(candidates), 0.2)))]
    text = write_documents(tmp_path / "text", [held_out, *make_documents(200)])
    knows_word = {}
    for fraction in (0.0, 0.2):
        recipe = write_recipe(tmp_path, text, corpus__validation_fraction=fraction)
        assert run(recipe, tmp_path / f"fsx-{fraction}") == 0
        model = published(tmp_path / f"fsx-{fraction}").path / "tokenizer" / "tokenizer.model"
        knows_word[fraction] = "▁qwertz" in pieces_of(model.read_bytes())

    assert knows_word == {0.0: True, 0.2: False}


def test_max_bytes_bounds_the_text_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_documents(tmp_path / "text", make_documents(100))
    assert run(write_recipe(tmp_path, text, tokenizer__train__max_bytes=23_456), tmp_path / "fsx") == 0
    assert "on 23,456 bytes" in capsys.readouterr().err


def test_a_given_model_goes_into_the_corpus_and_counts_as_an_input(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text", make_documents(60))
    model = tmp_path / "given.model"
    recipe = write_recipe(tmp_path, text, tokenizer__model=str(model))
    ids = set()
    for seed in (1, 2):
        model.write_bytes(train_vocabulary(make_documents(60, seed=seed), VOCAB_SIZE))
        root = tmp_path / f"fsx-{seed}"
        assert run(recipe, root) == 0
        corpus = published(root)
        stored = (corpus.path / "tokenizer" / "tokenizer.model").read_bytes()
        assert stored == model.read_bytes()
        assert corpus.manifest.corpus.vocabulary.sha256 == hashlib.sha256(stored).hexdigest()
        assert [link.schema_id for link in corpus.manifest.inputs] == ["text/1", "vocabulary/1"]
        ids.add(corpus.manifest.id)
    assert len(ids) == 2


def test_a_model_without_byte_pieces_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_bytes(make_text(20_000))
    prefix = tmp_path / "plain"
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "lines.txt"), model_prefix=str(prefix), model_type="bpe", vocab_size=100, minloglevel=2
    )
    text = write_documents(tmp_path / "text", make_documents(60))
    recipe = write_recipe(tmp_path, text, tokenizer__model=f"{prefix}.model", model__vocab_size=100)
    assert run(recipe, tmp_path / "fsx") == 0
    assert "no byte pieces" in capsys.readouterr().err


INTERRUPTED_WHILE_READING = """
import _thread, threading, time
from services.tokenizer.vocabulary.training import train_vocabulary

def read_slowly():
    threading.Timer(0.3, _thread.interrupt_main).start()
    for number in range(100_000):
        time.sleep(0.001)
        yield b"line %d of the text" % number

try:
    train_vocabulary(read_slowly(), 320)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_text_is_read_ends_the_process_in_order() -> None:
    command = [sys.executable, "-c", INTERRUPTED_WHILE_READING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
