"""What people do with a corpus: look into it, compare it with another, make a vocabulary for the next."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.store import Artifact
from services.common.errors import exit_code_of
from services.common.testing.manifests import forge, reseal
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.__main__ import main
from services.tokenizer.tests.builders import (
    REPOSITORY,
    VOCAB_SIZE,
    make_documents,
    make_text,
    published,
    read_stream,
    run,
    write_documents,
    write_recipe,
)
from services.tokenizer.tools import comparison
from services.tokenizer.vocabulary.training import train_vocabulary

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


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    def use(*arguments: str | Path) -> Said:
        capsys.readouterr()
        exit_code = exit_code_of(lambda: main([str(each) for each in arguments]))
        return Said(exit_code, *capsys.readouterr())

    return use


def make_corpus(folder: Path, documents: list[bytes], **overrides: Any) -> Artifact[CorpusManifest]:
    folder.mkdir(exist_ok=True)
    text = write_documents(folder / "text", documents)
    assert run(write_recipe(folder, text, **overrides), folder / "fsx") == 0
    return published(folder / "fsx")


@pytest.fixture(scope="module")
def documents() -> list[bytes]:
    return [*make_documents(50), SPECIAL, b"A document whose end is long after its begin. " * 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, documents: list[bytes]) -> Path:
    path = tmp_path_factory.mktemp("model") / "given.model"
    path.write_bytes(train_vocabulary(documents, VOCAB_SIZE))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[bytes], model: Path) -> Artifact[CorpusManifest]:
    """52 documents in several shards of both splits."""
    overrides: dict[str, Any] = {"corpus__validation_fraction": 0.3, "tokenizer__model": str(model)}
    return make_corpus(tmp_path_factory.mktemp("corpus"), documents, **overrides)


def shown_documents(output: str) -> list[str]:
    """The documents that `inspect` prints, without the margin and the marks around each."""
    parts = re.split(r"^document [\d,]+ of .*$", output, flags=re.MULTILINE)[1:]
    texts = ["\n".join(line[4:] for line in part.splitlines() if line.startswith("  │")) for part in parts]
    assert all(text.startswith("⟨BOS⟩") and text.endswith("⟨EOS⟩") for text in texts)
    return [text.removeprefix("⟨BOS⟩").removesuffix("⟨EOS⟩") for text in texts]


def without_line_ends(text: str) -> str:
    return re.sub(r" *\n", "\n", text)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_person_sees_the_numbers_of_a_corpus(corpus: Artifact[CorpusManifest], tool: Tool, split: Split) -> None:
    said = tool("inspect", corpus.path, "--split", split)
    payload, splits = corpus.manifest.corpus, corpus.manifest.corpus.splits
    lengths = np.array([len(document) for document in read_stream(corpus.path, split).documents])
    streams = {each: read_stream(corpus.path, each) for each in splits}
    files = [path for path in corpus.path.rglob("*") if path.is_file() and path.name != "manifest.json"]
    stored = sum(path.stat().st_size for path in files)
    tokens = sum(len(stream.tokens) for stream in streams.values())

    expected: dict[str, list[Any]] = {
        "documents": [len(stream.starts) for stream in streams.values()],
        "tokens": [len(stream.tokens) for stream in streams.values()],
        "BOS": [np.count_nonzero(stream.tokens == 1) for stream in streams.values()],
        "EOS": [np.count_nonzero(stream.tokens == 2) for stream in streams.values()],
        "rows": [len(stream.tokens) // 16 for stream in streams.values()],
        "tail tokens": [len(stream.tokens) % 16 for stream in streams.values()],
        "shards": [-(-(len(stream.tokens) // 16) // 8) for stream in streams.values()],
        "samples": [(len(stream.tokens) - 1) // 16 for stream in streams.values()],
    }
    assert said.exit_code == 0
    for name, counts in expected.items():
        assert said.value(name).split() == [f"{count:,}" for count in counts], name
    assert f"{payload.text_bytes / tokens:.3f} a token" in said.value("text")
    assert f"{stored:,} bytes, {stored / tokens:.3f} a token, of which 2 " in said.value("files")
    assert payload.encoder in said.value("ids")
    assert f"{payload.documents_checked:,}" in said.value("ids")
    source = payload.sources[0]
    assert f"100.0%       1  {source.documents:>9,}  {source.tokens:>6,}  {source.uri}" in said.output
    assert said.value("min") == (
        f"{lengths.min()}, median {np.quantile(lengths, 0.5, method='inverted_cdf'):,}, mean {lengths.mean():,.1f}, "
        f"p99 {np.quantile(lengths, 0.99, method='inverted_cdf'):,}, max {lengths.max():,}"
    )


def test_the_histogram_counts_every_document_in_its_power_of_two(corpus: Artifact[CorpusManifest], tool: Tool) -> None:
    said = tool("inspect", corpus.path, "--documents", "0")
    rows = re.findall(r"^ +([\d,]+) +to +([\d,]+) +([\d,]+) +([\d.]+)%(?:  (\S+))?$", said.output, re.MULTILINE)
    found = {int(low): (int(high.replace(",", "")), int(count), len(bar)) for low, high, count, _, bar in rows}
    lengths = [len(document) for document in read_stream(corpus.path, "train").documents]

    counts = {low: sum(low <= length <= high for length in lengths) for low, (high, _, _) in found.items()}
    assert {low: count for low, (_, count, _) in found.items()} == counts
    assert sum(counts.values()) == len(lengths)
    assert all(high == 2 * low - 1 for low, (high, _, _) in found.items())
    fullest = max(counts, key=lambda low: counts[low])
    assert found[fullest][2] == 40
    assert all((bar > 0) == (count > 0) for _, count, bar in found.values())
    assert "│" not in said.output


def test_every_document_can_be_read_again(corpus: Artifact[CorpusManifest], documents: list[bytes], tool: Tool) -> None:
    """Also the one that has the text of BOS and EOS in it: each stands between the marks once."""
    seen = []
    for split in ("train", "validation"):
        seen += shown_documents(tool("inspect", corpus.path, "--split", split, "--documents", "1000").output)
    short = {without_line_ends(each.decode()) for each in documents if len(each) < 240}

    assert len(seen) == len(documents)
    assert len(short) > 10
    assert short <= set(seen)
    assert SPECIAL.decode() in seen


def test_a_long_document_is_cut_in_the_middle(tmp_path: Path, model: Path, tool: Tool) -> None:
    """What is left is exact, also a space at the cut, which SentencePiece drops where it decodes an end alone."""
    text = b"the stream of tokens continues while nothing gets lost " * 100
    made = make_corpus(tmp_path, [text], tokenizer__model=str(model))
    ids = read_stream(made.path, "train").tokens.tolist()
    processor = load_model(model.read_bytes())
    head, tail_begin = str(processor.decode(ids[1:120])), len(str(processor.decode(ids[1:-60])))
    tail = text.decode()[tail_begin:]
    (shown,) = shown_documents(tool("inspect", made.path).output)

    assert tail.startswith(" ")
    assert shown == f"{head}⟨… {len(ids) - 120 - 60:,} tokens left out …⟩{tail}"


def test_documents_are_drawn_by_the_seed(corpus: Artifact[CorpusManifest], tool: Tool) -> None:
    drawn = [tool("inspect", corpus.path, "--seed", seed, "--documents", "5").output for seed in ("1", "1", "2")]

    assert drawn[0] == drawn[1] != drawn[2]
    assert len(shown_documents(drawn[0])) == len(shown_documents(drawn[2])) == 5


def test_what_would_act_on_a_terminal_is_escaped(tmp_path: Path, model: Path, tool: Tool) -> None:
    text = b"\x1b]0;title\x07 \x1b[31mred\r\n\0 \xe2\x80\xae reversed\ttab " * 3
    made = make_corpus(tmp_path, [text], tokenizer__model=str(model))
    said = tool("inspect", made.path)

    assert r"\x1b]0;title\x07 \x1b[31mred\r" in said.output
    assert r"\x00 \u202e reversed" in said.output
    assert "\ttab" in said.output
    assert not set(said.output) & set("\x1b\x07\r\0\u202e")


def test_a_terminal_without_unicode_gets_escapes(corpus: Artifact[CorpusManifest]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.tokenizer", "inspect", str(corpus.path), "--documents", "100"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert "⟨BOS⟩".encode("ascii", "backslashreplace") in done.stdout


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


def write_tiktoken(path: Path) -> Path:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" t", b" the", b"in", b"ing"]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def make_byte_level_corpus(folder: Path, kind: str, texts: list[bytes]) -> Artifact[CorpusManifest]:
    if kind == "tiktoken":
        given, size = write_tiktoken(folder / "tokenizer.model"), 256 + 6 + 256
    else:
        given, size = write_tokenizer_json(folder / "tokenizer.json", texts, "<s>", "</s>"), VOCAB_SIZE
    return make_corpus(folder / "made", texts, tokenizer__model=str(given), model__vocab_size=size)


@pytest.mark.parametrize("kind", ["tokenizer_json", "tiktoken"])
def test_vocabularies_of_llama_3_are_decoded_too(tmp_path: Path, documents: list[bytes], tool: Tool, kind: str) -> None:
    texts = [*documents[:30], SPECIAL]
    made = make_byte_level_corpus(tmp_path, kind, texts)
    said = tool("inspect", made.path, "--documents", "100")
    seen = shown_documents(said.output)

    assert said.value("vocabulary").startswith(f"{kind}, {made.manifest.corpus.vocabulary.vocab_size:,} ids")
    assert len(seen) == len(texts)
    assert SPECIAL.decode() in seen
    for shown, text in zip(seen, texts, strict=True):
        head, _, tail = shown.partition("⟨…")
        assert without_line_ends(text.decode()).startswith(head)
        assert without_line_ends(text.decode()).endswith(tail.partition("…⟩")[2])


@pytest.mark.parametrize("kind", ["tokenizer_json", "tiktoken"])
def test_ids_that_llama_3_has_no_text_for_are_named(
    tmp_path: Path, documents: list[bytes], tool: Tool, kind: str
) -> None:
    made = make_byte_level_corpus(tmp_path, kind, documents[:30])
    flip_a_token(made.path / "train" / "shard-00000.arrow", 5, made.manifest.corpus.vocabulary.vocab_size)
    said = tool("inspect", made.path, "--documents", "100")

    assert said.exit_code == 3
    assert str(made.manifest.corpus.vocabulary.vocab_size) in said.errors
    assert "artifacts verify" in said.errors


def test_borders_are_where_the_corpus_says_even_if_bos_is_eos(
    tmp_path: Path, documents: list[bytes], tool: Tool
) -> None:
    """As in GPT-2's vocabulary, where one token is both."""
    given = write_tokenizer_json(tmp_path / "tokenizer.json", documents, "<|endoftext|>")
    borders = {"tokenizer__bos_token": "<|endoftext|>", "tokenizer__eos_token": "<|endoftext|>"}
    made = make_corpus(tmp_path / "made", [b"one" * 20, b"two" * 20], tokenizer__model=str(given), **borders)
    said = tool("inspect", made.path)

    assert re.findall(r"│ ⟨BOS/EOS⟩(.*)⟨BOS/EOS⟩$", said.output, re.MULTILINE) == ["one" * 20, "two" * 20]
    assert said.value("documents").split() == ["2", "0"]


def test_a_split_without_documents_says_so(tmp_path: Path, model: Path, tool: Tool) -> None:
    made = make_corpus(tmp_path, [make_text(2_000)], tokenizer__model=str(model))
    said = tool("inspect", made.path, "--split", "validation")

    assert said.exit_code == 0
    assert "no documents in validation" in said.output


@pytest.fixture
def copy(corpus: Artifact[CorpusManifest], tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus.path, tmp_path / "copy"))


def cut_off(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-100])


def zero(shard: Path) -> None:
    shard.write_bytes(bytes(shard.stat().st_size))


def move_starts(shard: Path) -> None:
    """Documents that begin outside of the shard, in a file of the same size."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts")
    moved = pa.ListArray.from_arrays(
        starts.offsets, pa.array(starts.values.to_numpy() + 10_000), type=batch.schema.field("doc_starts").type
    )
    rewritten = pa.record_batch([batch.column("input_ids"), moved], schema=batch.schema)
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(rewritten)


def begin_late(shard: Path) -> None:
    """The first document does not begin where the tokens do."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts").to_pylist()
    starts[0][0] += 1
    moved = pa.array(starts, batch.schema.field("doc_starts").type)
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(pa.record_batch([batch.column("input_ids"), moved], schema=batch.schema))


def misplace_a_list(shard: Path) -> None:
    """A file whose doc_starts point far beyond its end."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts")
    offsets = starts.offsets.to_numpy().copy()
    offsets[2:-1] = 1_000_000
    misplaced = pa.Array.from_buffers(starts.type, len(starts), [None, pa.py_buffer(offsets)], children=[starts.values])
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(pa.record_batch([batch.column("input_ids"), misplaced], schema=batch.schema))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (Path.unlink, ["train/shard-00001.arrow: missing", "run the stage again"]),
        (cut_off, ["train/shard-00001.arrow", "bytes, the manifest says", "run the stage again"]),
        (zero, ["train/shard-00001.arrow: cannot be read", "artifacts verify"]),
        (misplace_a_list, ["train/shard-00001.arrow: cannot be read", "artifacts verify"]),
        (move_starts, ["train/shard-00001.arrow: its doc_starts", "artifacts verify"]),
    ],
)
def test_a_damaged_folder_is_named_and_not_shown(
    copy: Path, tool: Tool, damage: Callable[[Path], None], expected: list[str]
) -> None:
    assert tool("inspect", copy).exit_code == 0
    damage(copy / "train" / "shard-00001.arrow")
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert all(part in said.errors for part in expected), said.errors
    assert "⟨BOS⟩" not in said.output


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


def test_the_first_token_begins_a_document(copy: Path, tool: Tool) -> None:
    begin_late(copy / "train" / "shard-00000.arrow")
    forge(copy)
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert "train/shard-00000.arrow: its first token begins no document" in said.errors


def test_documents_are_counted(copy: Path, tool: Tool) -> None:
    lose_a_document(copy / "train" / "shard-00001.arrow")
    forge(copy)
    number = len(read_stream(copy, "train").starts)
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert f"{number:,} documents begin, the manifest says {number + 1:,}" in said.errors


def test_another_vocabulary_file_than_the_manifests_decodes_nothing(copy: Path, tool: Tool) -> None:
    content = bytearray((copy / MODEL).read_bytes())
    content[1_000] ^= 1
    (copy / MODEL).write_bytes(content)
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert f"{MODEL}: xxh3-128 is" in said.errors


def flip_a_token(shard: Path, position: int, token: int) -> None:
    """Rewrite one token, as a failing disk does: the size stays."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    tokens = batch.column("input_ids").values.to_numpy().copy()
    tokens[position] = token
    stored = pa.FixedSizeListArray.from_arrays(pa.array(tokens), type=batch.schema.field("input_ids").type)
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(pa.record_batch([stored, batch.column("doc_starts")], schema=batch.schema))


def test_an_id_that_is_not_in_the_vocabulary_is_named(copy: Path, tool: Tool) -> None:
    flip_a_token(copy / "train" / "shard-00000.arrow", 5, 60_000)
    said = tool("inspect", copy, "--documents", "1000")

    assert said.exit_code == 3
    assert "60000" in said.errors
    assert "artifacts verify" in said.errors


@pytest.mark.parametrize("arguments", [["inspect"], ["diff", "."]])
def test_a_folder_that_is_no_corpus_is_refused(tmp_path: Path, tool: Tool, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "manifest.json").write_text('{"schema": "corpus/2", ')
    for folder, expected in {
        tmp_path / "missing": "not a published artifact",
        tmp_path / "file": "not a published artifact",
        tmp_path / "folder": "not a published artifact",
        torn: "damaged: not a sealed manifest",
    }.items():
        said = tool(arguments[0], folder, *[folder for _ in arguments[1:]])
        assert (said.exit_code, expected in said.errors) == (3, True), said.errors


@pytest.mark.parametrize("schema", ["checkpoint/1", "corpus/9"])
def test_an_artifact_of_another_schema_is_refused(copy: Path, tool: Tool, schema: str) -> None:
    reseal(copy, lambda fields: fields.update(schema=schema))
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert f"schema '{schema}', this program reads 'corpus/2'" in said.errors


def test_the_same_recipe_made_twice_is_identical(
    corpus: Artifact[CorpusManifest], documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    again = make_corpus(
        tmp_path, documents, corpus__validation_fraction=0.3, tokenizer__model=str(model), tokenizer__num_workers=2
    )
    said = tool("diff", corpus.path, again.path)

    assert said.exit_code == 0
    assert "identical" in said.output
    assert corpus.manifest.content_digest in said.output


@pytest.mark.parametrize(
    "layout",
    [
        {"corpus__rows_per_shard": 5},
        {"corpus__sequence_length": 24},
        {"corpus__sequence_length": 9, "corpus__rows_per_shard": 1000},
    ],
)
@pytest.mark.parametrize("compared_tokens", [2**22, 7, 128])
def test_the_same_text_in_other_rows_is_the_same_stream(
    corpus: Artifact[CorpusManifest],
    documents: list[bytes],
    model: Path,
    tmp_path: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, int],
    compared_tokens: int,
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_TOKENS", compared_tokens)
    other = make_corpus(tmp_path, documents, corpus__validation_fraction=0.3, tokenizer__model=str(model), **layout)
    said = tool("diff", corpus.path, other.path)

    assert said.exit_code == 0
    assert said.value("vocabulary") == "the same"
    assert said.value("layout") == "different"
    for name in ("sequence_length", "rows_per_shard"):
        assert (f"{name}: left" in said.output) == (f"corpus__{name}" in layout)
    for split, counts in corpus.manifest.corpus.splits.items():
        assert said.value(split) == f"the same {counts.tokens:,} tokens in {counts.documents:,} documents"
    assert said.output.endswith("the same tokens and documents, with another layout\n")


@pytest.mark.parametrize("compared_tokens", [2**22, 7])
def test_one_changed_document_is_found_where_it_is(
    documents: list[bytes],
    model: Path,
    tmp_path: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    compared_tokens: int,
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_TOKENS", compared_tokens)
    changed = list(documents)
    begin = len(changed[30]) // 2
    changed[30] = changed[30][:begin] + "Ünlike".encode() + changed[30][begin:]
    left = make_corpus(tmp_path / "left", documents, tokenizer__model=str(model))
    right = make_corpus(tmp_path / "right", changed, tokenizer__model=str(model), corpus__rows_per_shard=3)
    ours, theirs = read_stream(left.path, "train"), read_stream(right.path, "train")
    size = min(len(ours.tokens), len(theirs.tokens))
    position = int(np.argmax(ours.tokens[:size] != theirs.tokens[:size]))
    said = tool("diff", left.path, right.path)

    assert said.exit_code == 3
    assert said.errors.count("millrace:") == 0
    assert said.value("train") == "different"
    assert f"{len(ours.tokens):,} tokens in 52 documents" in said.output
    assert f"{len(theirs.tokens):,} tokens in 52 documents" in said.output
    assert said.value("first at") == (
        f"token {position:,}: document 30, token {position - ours.starts[30]:,} of it (all from 0)"
    )
    for stream in (ours, theirs):
        before, here, after = np.split(stream.tokens[position - 4 : position + 5], [4, 5])
        assert f"ids {' '.join(map(str, before))} [{here[0]}] {' '.join(map(str, after))}\n" in said.output
    left_text, right_text = said.output.split("    left    │ ")[1].split("    right   │ ")
    assert left_text.split("⟨≠⟩")[0] == right_text.split("⟨≠⟩")[0]
    assert ("Ünlike" in left_text, "⟨≠⟩Ünlike" in right_text) == (False, True)
    assert said.output.endswith("different: train\n")


@pytest.mark.parametrize(("is_left_longer", "compared_tokens"), [(True, 2**22), (False, 2**22), (True, 1)])
def test_a_corpus_that_only_goes_on_parts_at_the_others_end(
    documents: list[bytes],
    model: Path,
    tmp_path: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    is_left_longer: bool,
    compared_tokens: int,
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_TOKENS", compared_tokens)
    short = make_corpus(tmp_path / "short", documents[:20], tokenizer__model=str(model))
    longer = make_corpus(tmp_path / "longer", documents[:21], tokenizer__model=str(model))
    end = len(read_stream(short.path, "train").tokens)
    said = tool("diff", *((longer.path, short.path) if is_left_longer else (short.path, longer.path)))

    assert said.exit_code == 3
    assert said.value("first at") == f"token {end:,}: document 20, token 0 of it (all from 0)"
    side = "right" if is_left_longer else "left"
    assert re.search(rf"^    {side} +ids .* 2 \[end of the stream\]$", said.output, re.MULTILINE)


def test_the_text_around_a_difference_is_as_it_was_written(
    documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    """SentencePiece puts a space before a document, which is not the author's."""
    ends = {"left": b"the stream of tokens " * 9, "right": b"nothing gets lost " * 9}
    made = [
        make_corpus(tmp_path / side, [documents[0], end], tokenizer__model=str(model)).path
        for side, end in ends.items()
    ]
    said = tool("diff", *made)

    assert "token 1 of it" in said.value("first at")
    assert "⟨EOS⟩⟨BOS⟩⟨≠⟩the stream of tokens the" in said.output
    assert "⟨EOS⟩⟨BOS⟩⟨≠⟩nothing gets lost nothing" in said.output


def test_tokens_that_belong_to_no_further_document_are_another_stream(
    documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    short = make_corpus(tmp_path / "short", documents[:20], tokenizer__model=str(model))
    longer = make_corpus(tmp_path / "longer", documents[:21], tokenizer__model=str(model))
    end = len(read_stream(short.path, "train").tokens)
    lose_a_document(longer.path / "train" / f"shard-{end // (8 * 16):05d}.arrow")
    forge(longer.path)
    said = tool("diff", short.path, longer.path)

    assert read_stream(longer.path, "train").starts == read_stream(short.path, "train").starts
    assert said.exit_code == 3
    assert said.value("first at").startswith(f"token {end:,}: ")


def test_documents_that_begin_elsewhere_are_another_corpus(
    documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    """The tokens may be the same, and attention is not."""
    stored = make_corpus(tmp_path, documents, tokenizer__model=str(model))
    other = Path(shutil.copytree(stored.path, tmp_path / "other"))
    lose_a_document(other / "train" / "shard-00001.arrow")
    lost = next(start for start in reversed(read_stream(stored.path, "train").starts) if start < 2 * 8 * 16)
    forge(other)
    said = tool("diff", stored.path, other)

    assert said.exit_code == 3
    assert said.value("first at").startswith(f"token {lost:,}: document ")


def test_a_difference_in_validation_alone_is_seen(
    corpus: Artifact[CorpusManifest], documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    other = Path(shutil.copytree(corpus.path, tmp_path / "other"))
    flip_a_token(other / "validation" / "shard-00000.arrow", 3, 77)
    forge(other)
    said = tool("diff", corpus.path, other)

    assert said.exit_code == 3
    assert said.value("train").startswith("the same")
    assert said.value("validation") == "different"
    assert "token 3: document 0, token 3 of it" in said.value("first at")
    assert said.output.endswith("different: validation\n")


def test_damage_does_not_pass_for_other_content(
    corpus: Artifact[CorpusManifest], documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    other = make_corpus(
        tmp_path, documents, corpus__validation_fraction=0.3, tokenizer__model=str(model), corpus__rows_per_shard=9
    )
    assert tool("diff", corpus.path, other.path).exit_code == 0
    flip_a_token(other.path / "train" / "shard-00000.arrow", 20, 77)
    said = tool("diff", corpus.path, other.path)

    assert said.exit_code == 3
    assert "train/shard-00000.arrow: xxh3-128 is" in said.errors
    assert "different: train" not in said.output


def test_another_vocabulary_is_named_and_its_ids_are_not_taken_for_text(
    corpus: Artifact[CorpusManifest], documents: list[bytes], tmp_path: Path, tool: Tool
) -> None:
    given = write_tokenizer_json(tmp_path / "tokenizer.json", documents, "<s>", "</s>")
    other = make_corpus(tmp_path / "other", documents, corpus__validation_fraction=0.3, tokenizer__model=str(given))
    said = tool("diff", corpus.path, other.path)

    assert said.exit_code == 3
    assert said.value("vocabulary") == "different"
    for each in (corpus, other):
        vocabulary = each.manifest.corpus.vocabulary
        assert re.search(rf"{vocabulary.kind}, 400 ids, .* sha256 {vocabulary.sha256}", said.output)
    assert "[0]" in said.output
    assert "[1]" in said.output
    assert "⟨≠⟩" not in said.output
    assert said.output.endswith("different: train and validation\n")


def test_a_vocabulary_that_has_grown_gives_the_same_tokens_in_wider_ids(
    documents: list[bytes], tmp_path: Path, tool: Tool
) -> None:
    made = []
    for name, unused in (("narrow", 0), ("wide", 70_000)):
        given = write_tokenizer_json(tmp_path / f"{name}.json", documents, "<s>", "</s>", unused=unused)
        size = VOCAB_SIZE + unused
        made.append(make_corpus(tmp_path / name, documents, tokenizer__model=str(given), model__vocab_size=size).path)
    said = tool("diff", *made)

    assert said.exit_code == 0
    assert "token_dtype: left uint16, right uint32" in said.output
    assert said.output.endswith("the same tokens and documents, with another vocabulary and layout\n")


def test_a_vocabulary_made_alone_is_the_stages_own(tmp_path: Path, documents: list[bytes], tool: Tool) -> None:
    made = make_corpus(tmp_path / "stage", documents)
    path = tmp_path / "alone.model"
    said = tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, tmp_path / "stage" / "text")

    assert said.exit_code == 0
    assert path.read_bytes() == (made.path / MODEL).read_bytes()
    assert said.value("sha256") == made.manifest.corpus.vocabulary.sha256
    assert said.value("pieces").startswith(f"{VOCAB_SIZE},")
    assert said.value("size") == f"{path.stat().st_size:,} bytes"
    assert said.value("text") == f"{sum(map(len, documents)):,} bytes of {len(documents)} documents"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["alone.model"]

    recipe = tomllib.loads(said.output[said.output.index("[tokenizer]\n") :])
    assert recipe == {"tokenizer": {"model": str(path)}, "model": {"vocab_size": VOCAB_SIZE}}
    again = make_corpus(tmp_path / "again", documents, tokenizer__model=recipe["tokenizer"]["model"])
    assert again.manifest.content_digest == made.manifest.content_digest


def test_a_vocabulary_is_made_from_the_first_bytes_of_several_sources(
    tmp_path: Path, documents: list[bytes], tool: Tool
) -> None:
    texts = [document.decode() for document in documents]
    pq.write_table(pa.table({"body": texts[:30]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[30:]))
    pieces = [*documents[:-1], documents[-1][:-500]]
    limit = sum(map(len, pieces))
    options = ("--vocab-size", VOCAB_SIZE, "--max-bytes", limit, "--column", "body")
    said = tool("train-vocab", "--output", tmp_path / "a.model", *options, tmp_path / "a.parquet", tmp_path / "b.jsonl")

    assert said.value("text").startswith(f"{limit:,} bytes of ")
    assert (tmp_path / "a.model").read_bytes() == train_vocabulary(pieces, VOCAB_SIZE)


def test_a_vocabulary_that_is_there_is_never_overwritten(tmp_path: Path, documents: list[bytes], tool: Tool) -> None:
    text = write_documents(tmp_path / "text", documents)
    path = tmp_path / "mine.model"
    path.write_bytes(b"mine")
    said = tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, text)

    assert said.exit_code == 2
    assert "mine.model: exists already and is not overwritten" in said.errors
    assert path.read_bytes() == b"mine"


def test_a_vocabulary_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, documents: list[bytes], tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_documents(tmp_path / "text", documents)
    path = tmp_path / "mine.model"

    def train_slowly(*arguments: Any) -> bytes:
        path.write_bytes(b"another's")
        return train_vocabulary(*arguments)

    monkeypatch.setattr("services.tokenizer.tools.vocabulary_tool.train_vocabulary", train_slowly)
    assert tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, text).exit_code == 2
    assert path.read_bytes() == b"another's"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.model", "text"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["--vocab-size", "90000", "TEXT"], 2, ["90,000 is too large for this text", "it is --vocab-size"]),
        (["--vocab-size", "299", "TEXT"], 2, ["vocab-size", "300", "usage: python -m services.tokenizer train-vocab"]),
        (["--vocab-size", "400", "--max-bytes", "0", "TEXT"], 2, ["max-bytes", "usage"]),
        (["--vocab-size", "400", "--format", "word", "TEXT"], 2, ["--format", "wikicorpus"]),
        (["--vocab-size", "400"], 2, ["SOURCE", "usage"]),
        (["--vocab-size", "400", "missing.txt"], 3, ["missing.txt: no such file or folder"]),
        (["--vocab-size", "400", "EMPTY"], 3, ["No text in", "empty.txt"]),
    ],
)
def test_a_vocabulary_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, tool: Tool, arguments: list[str], exit_code: int, expected: list[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "text.txt").write_bytes(make_text(20_000))
    (tmp_path / "empty.txt").touch()
    files = {"TEXT": tmp_path / "text.txt", "EMPTY": tmp_path / "empty.txt"}
    said = tool("train-vocab", "--output", folder / "a.model", *(files.get(each, each) for each in arguments))

    assert said.exit_code == exit_code, said.errors
    assert all(part in said.errors for part in expected), said.errors
    assert list(folder.iterdir()) == []


def test_a_vocabulary_needs_a_folder_that_is_there(tmp_path: Path, tool: Tool) -> None:
    said = tool("train-vocab", "--output", tmp_path / "missing" / "a.model", "--vocab-size", "400", "pydoc://")

    assert said.exit_code == 2
    assert "missing: no such folder" in said.errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspekt", "."], ["'inspekt': no such tool", "inspect, diff, train-vocab", "--recipe FILE"]),
        (["inspect"], ["DIR", "usage: python -m services.tokenizer inspect"]),
        (["inspect", ".", "--documents", "-1"], ["--documents -1", "usage"]),
        (["inspect", ".", "--split", "test"], ["--split", "validation"]),
        (["diff", "."], ["DIR", "usage: python -m services.tokenizer diff"]),
        (["--launch", "inline"], ["--recipe", "usage: python -m services.tokenizer"]),
    ],
)
def test_wrong_command_lines(tool: Tool, arguments: list[str], expected: list[str]) -> None:
    said = tool(*arguments)

    assert said.exit_code == 2
    assert all(part in said.errors for part in expected), said.errors


def test_help_of_the_stage_names_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out

    assert "--recipe FILE" in shown
    assert "--train.max_steps=500" in shown
    assert re.findall(r"^  (inspect|diff|train-vocab) +\w", shown, re.MULTILINE) == ["inspect", "diff", "train-vocab"]
