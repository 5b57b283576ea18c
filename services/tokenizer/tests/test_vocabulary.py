"""A vocabulary is given, or trained on a sample of the training split: by the stage, or by `train-vocab` alone."""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Tokenizer
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.__main__ import main
from services.tokenizer.corpus_inputs import CorpusInputs, list_corpus_inputs
from services.tokenizer.document_hashes import are_for_validation
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.sources.input_files import FileRange
from services.tokenizer.tests.builders import (
    VOCAB_SIZE,
    make_documents,
    make_text,
    pieces_of,
    publish,
    published,
    run,
    write_documents,
    write_jsonl,
    write_recipe,
)
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.provision import describe_vocabulary
from services.tokenizer.vocabulary.text_sample import sample_text
from services.tokenizer.vocabulary.training import train_vocabulary


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


@pytest.mark.parametrize("line", [b"xylophone " * 500_000, b"\xe2\x96\x85 xylophone \xe2\x96\x85", b"\0 xylophone \0"])
def test_no_line_is_left_out(line: bytes) -> None:
    """SentencePiece ignores long lines, and lines with a certain character, without a message."""
    documents = [*make_documents(60), *[line] * (1 if len(line) > 1_000 else 200)]
    assert "xylophone" in "".join(pieces_of(train_vocabulary(documents, VOCAB_SIZE))).replace("▁", "")


def plan_sample(
    folder: Path, max_bytes: int, *weighted: tuple[Path, float], **settings: Any
) -> tuple[list[bytes], CorpusInputs]:
    sources = [{"uri": str(path), "weight": weight} for path, weight in weighted]
    recipe = load_recipe(write_recipe(folder, *sources, **settings))
    inputs = list_corpus_inputs(recipe)
    return sample_text(recipe.corpus, inputs.listings, max_bytes), inputs


def test_validation_text_is_not_in_the_sample(tmp_path: Path) -> None:
    documents = make_documents(200)
    held_out = are_for_validation(TextBatch.of(documents), 0.2)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    sample, _ = plan_sample(tmp_path, 10**6, (path, 1.0), corpus__validation_fraction=0.2)
    assert sorted(sample) == sorted(
        document for document, is_held in zip(documents, held_out, strict=True) if not is_held
    )
    assert held_out.any()


def count_bytes(documents: Sequence[bytes], kind: bytes) -> int:
    return sum(len(document) for document in documents if document.startswith(kind))


@pytest.mark.parametrize("max_bytes", [100_000, 1_000_000])
def test_each_source_has_its_share_of_the_text(tmp_path: Path, max_bytes: int) -> None:
    """The first sample reads a part of the sources, and the second one all of them."""
    paths = [
        write_jsonl(tmp_path / f"{kind}.jsonl", [f"{kind}{number:05d} {'x' * 41}" for number in range(count)])
        for kind, count in (("a", 30_000), ("b", 10_000), ("c", 20_000))
    ]
    weighted = list(zip(paths, (0.5, 3, 1), strict=True))
    sample, _ = plan_sample(tmp_path, max_bytes, *weighted, corpus__validation_fraction=0.1)

    assert sum(map(len, sample)) == max_bytes
    shares = [count_bytes(sample, kind) / max_bytes for kind in (b"a", b"b", b"c")]
    assert shares == pytest.approx([15 / 65, 30 / 65, 20 / 65], abs=0.05)
    # Neither does the order of the sources change the sample, nor a file's name, nor the size of partitions.
    other = [(paths[0].rename(tmp_path / "z.jsonl"), 0.5), *weighted[:0:-1]]
    settings = {"corpus__validation_fraction": 0.1, "corpus__split_bytes": 50_000}
    assert plan_sample(tmp_path, max_bytes, *other, **settings)[0] == sample


def test_bytes_that_are_read_are_bounded_by_those_of_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bytes for one, and a file range for each source; a source of little weight is read, too."""
    read: list[FileRange] = []

    def read_and_record(file_ranges: Sequence[FileRange], *arguments: Any) -> Any:
        read.extend(file_ranges)
        return read_documents(file_ranges, *arguments)

    monkeypatch.setattr("services.tokenizer.vocabulary.text_sample.read_documents", read_and_record)
    large = tmp_path / "large"
    large.mkdir()
    for number in range(20):
        write_jsonl(large / f"{number}.jsonl", [f"large {number} {line:05d} {'x' * 30}" for line in range(5_000)])
    small = write_jsonl(tmp_path / "small.jsonl", [f"small {line:05d} {'x' * 30}" for line in range(5_000)])
    for max_bytes in (20_000, 80_000):
        read.clear()
        sample, inputs = plan_sample(tmp_path, max_bytes, (large, 1.0), (small, 0.01))

        assert sum(map(len, sample)) == max_bytes
        bytes_of_file_ranges = [file_range.bytes for file_range in read]
        assert sum(bytes_of_file_ranges) <= 8 * max_bytes + 2 * max(bytes_of_file_ranges)
        assert sum(bytes_of_file_ranges) < sum(file.bytes for files in inputs.listings for file in files) / 6
        assert len(read) <= 8 * 256 + 2
        assert len({file_range.file for file_range in read}) > 4
        assert small in {Path(file_range.file.uri) for file_range in read}


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


def train_vocab(*arguments: object) -> int:
    """Call the tool in this process, and return its exit code."""
    return exit_code_of(lambda: main(["train-vocab", *map(str, arguments)]))


def test_a_vocabulary_made_alone_is_the_stages_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [*make_documents(50), "größe </s> <s> 漢字 and 🎉".encode()]
    text = write_documents(tmp_path / "text", documents)
    made = publish(write_recipe(tmp_path, text), tmp_path / "fsx")
    path = tmp_path / "alone.model"
    command = ("--output", path, "--vocab-size", VOCAB_SIZE, text)
    capsys.readouterr()

    assert train_vocab(*command) == 0

    output = capsys.readouterr().out
    assert path.read_bytes() == (made.path / "tokenizer" / "tokenizer.model").read_bytes()
    assert made.manifest.corpus.vocabulary.sha256 in output
    recipe = tomllib.loads(output[output.index("[tokenizer]\n") :])
    assert recipe == {"tokenizer": {"model": str(path)}, "model": {"vocab_size": VOCAB_SIZE}}
    again = publish(write_recipe(tmp_path, text, tokenizer__model=str(path)), tmp_path / "again")
    assert again.manifest.content_digest == made.manifest.content_digest

    path.write_bytes(b"mine")  # is never overwritten
    assert train_vocab(*command) == 2
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["--vocab-size", "90000", "TEXT"], 2, "vocab_size"),
        (["--vocab-size", "299", "TEXT"], 2, "vocab-size"),
        (["--vocab-size", "400", "--max-bytes", "0", "TEXT"], 2, "max-bytes"),
        (["--vocab-size", "400"], 2, "SOURCE"),
        (["--vocab-size", "400", "missing.txt"], 3, "missing.txt"),
        (["--vocab-size", "400", "EMPTY"], 3, "empty.txt"),
        (["--vocab-size", "400", "TEXT", "--output", "/proc/a.model"], 2, "--output"),  # no user can write there
    ],
)
def test_a_vocabulary_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int, expected: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "text.txt").write_bytes(make_text(20_000))
    (tmp_path / "empty.txt").touch()
    files = {"TEXT": tmp_path / "text.txt", "EMPTY": tmp_path / "empty.txt"}
    options = (str(files.get(each, each)) for each in arguments)
    assert train_vocab("--output", folder / "a.model", *options) == exit_code
    assert expected in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_the_output_is_taken_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_bytes(make_text(20_000))
    command = ("--output", tmp_path / "a.model", "--vocab-size", VOCAB_SIZE, tmp_path / "text.txt")

    def train_beside_another(*_: object) -> tuple[bytes, list[bytes]]:
        assert train_vocab(*command) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr("services.tokenizer.tools.vocabulary_tool.train_on_sample", train_beside_another)
    with pytest.raises(KeyboardInterrupt):
        main(["train-vocab", *map(str, command)])
    assert not (tmp_path / "a.model").exists()


def test_an_error_of_sentencepiece_that_is_not_about_the_text_is_no_fault_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RecipeError):
        train_vocabulary([b"\n"], VOCAB_SIZE)

    def fail(**_: object) -> None:
        raise RuntimeError("INTERNAL: out of threads")

    monkeypatch.setattr("sentencepiece.SentencePieceTrainer.train", fail)
    with pytest.raises(RuntimeError):
        train_vocabulary(make_documents(1), VOCAB_SIZE)
