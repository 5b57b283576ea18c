"""Ids are those of the library that defines the vocabulary, for any text. `make test-slow` compares 100 MB of it."""

from __future__ import annotations

import base64
import functools
import io
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, pre_tokenizers

from services.common.errors import DeviceError
from services.common.recipe.schema import Source
from services.common.testing.seeds import draw_seed
from services.common.vocabularies.fuzz import fuzz_documents
from services.tokenizer.encoding import chunk_encoder
from services.tokenizer.encoding.byte_level import FastokensEncoder
from services.tokenizer.encoding.chunk_encoder import ChunkEncoder, load_kernels
from services.tokenizer.encoding.chunk_tables import (
    BLOCK_BYTES,
    CACHED_BYTES,
    SHORT_BYTES,
    SPACE_PIECE,
    obstacle_to_chunks,
)
from services.tokenizer.encoding.encoder import SAMPLED_BYTES, CheckedEncoder, find_difference
from services.tokenizer.encoding.kernel_compiler import KernelCache
from services.tokenizer.sources.python_docs import URI
from services.tokenizer.tests.builders import (
    REPOSITORY,
    load_reference,
    make_documents,
    make_text,
    pieces_of,
    publish,
    publish_documents,
    published,
    read_all,
    read_stream,
    write_documents,
    write_recipe,
)
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.training import train_vocabulary

GREEK_AND_KANA = [("αβγδ εζη " * 30 + "かな カナ 漢字かな " * 30 + "naïve café ").encode()] * 20


@pytest.fixture(scope="module", params=["documentation", "words"])
def model(request: pytest.FixtureRequest) -> bytes:
    """Two models: 4,096 pieces of Python's documentation, and 500 pieces of generated words and other scripts."""
    if request.param == "words":
        return train_vocabulary([*make_documents(200), *GREEK_AND_KANA], 500)
    return train_vocabulary(python_documentation()[:300], 4_096)


@functools.cache
def python_documentation() -> Sequence[bytes]:
    return tuple(document.encode() for document in read_all(Source(uri=URI), 2**20, invalid_utf8="replace"))


def difference(model: bytes, documents: Sequence[bytes]) -> bytes | None:
    return find_difference(ChunkEncoder.from_model(model), load_reference(model), TextBatch.of(documents))


def test_python_documentation_has_sentencepieces_ids(model: bytes) -> None:
    documents = python_documentation()

    assert sum(map(len, documents)) > 2_000_000
    assert difference(model, documents) is None


def test_fuzz_has_sentencepieces_ids(model: bytes) -> None:
    assert difference(model, fuzz_documents(pieces_of(model), 3_000, seed=draw_seed())) is None


@pytest.mark.parametrize("size", [SHORT_BYTES, SHORT_BYTES + 1, CACHED_BYTES, CACHED_BYTES + 1, 5_000, 200_000])
def test_long_runs_without_a_border_have_sentencepieces_ids(model: bytes, size: int) -> None:
    """The kernel has a way for each range of sizes. The largest runs do not fit into its first buffer."""
    chosen = random.Random(size)
    letters = "".join(chosen.choice("theinatr") for _ in range(size))
    scripts = "".join(chosen.choice("αβγかなカ漢字é") for _ in range(size))
    runs = [" " * size, "a" * size, letters, scripts[: size // 2], "\u2581" * (size // 3), "é" * (size // 2)]
    assert difference(model, [run.encode() for run in runs] * 2) is None


def test_text_around_the_end_of_a_block_has_sentencepieces_ids(model: bytes) -> None:
    text = make_text(2 * BLOCK_BYTES)
    documents = [text[: BLOCK_BYTES + shift] for shift in range(-20, 20)]
    documents += [b"x" * (BLOCK_BYTES - shift) + " naïve かな end".encode() for shift in range(20)]
    assert difference(model, documents) is None


def test_ids_do_not_depend_on_what_was_encoded_before(model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of seen chunks is full and emptied meanwhile, and the arrays beside it are full."""
    monkeypatch.setattr(chunk_encoder, "_ENTRIES", 1_024)
    monkeypatch.setattr(chunk_encoder, "_LONG_IDS", 500)
    monkeypatch.setattr(chunk_encoder, "_LONG_CHUNKS_BYTES", 500)
    encoder, reference = ChunkEncoder.from_model(model), load_reference(model)
    documents = list(python_documentation())
    chosen = random.Random(draw_seed())
    for _ in range(2):
        chosen.shuffle(documents)
        for begin, end in pairwise(range(0, 200, 20)):
            assert find_difference(encoder, reference, TextBatch.of(documents[begin:end])) is None
    assert encoder._cache.used[0] <= 1_024


def change(model: bytes, **settings: Any) -> bytes:
    """Return the model with other settings, such as `trainer_spec__model_type=1`."""
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    for dotted, value in settings.items():
        section, _, key = dotted.partition("__")
        setattr(getattr(proto, section), key, value)
    return bytes(proto.SerializeToString())


def change_pieces(model: bytes, *pieces: tuple[int, str, int]) -> bytes:
    """Return the model with some pieces replaced. Each is an (index, piece, type)."""
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    for index, piece, kind in pieces:
        proto.pieces[index].piece, proto.pieces[index].type = piece, kind
    return bytes(proto.SerializeToString())


def without_spaces(model: bytes) -> list[tuple[int, str, int]]:
    return [
        (index, f"{piece.replace(SPACE_PIECE, 'e')}#{index}", NORMAL)
        for index, piece in enumerate(pieces_of(model))
        if SPACE_PIECE in piece
    ]


def train_plainly(**settings: Any) -> bytes:
    """Train a model with SentencePiece's own defaults: NFKC, no repeated spaces, no byte pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["words and more words to learn from"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=40,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


NORMAL, USER_DEFINED, UNUSED = 1, 4, 5


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        (lambda model: change(model, trainer_spec__model_type=1), "BPE"),
        (lambda model: change(model, normalizer_spec__remove_extra_whitespaces=True), "extra spaces"),
        (lambda model: change(model, normalizer_spec__escape_whitespaces=False), "escape"),
        (lambda model: train_plainly(), "normaliser"),
        (lambda model: change(model, trainer_spec__treat_whitespace_as_suffix=True), "end of words"),
        (lambda model: change_pieces(model, (490, "hello", USER_DEFINED)), "user-defined"),
        (lambda model: change_pieces(model, (490, "hello", UNUSED)), "unused"),
        (lambda model: change_pieces(model, (490, "ΩΩ", NORMAL)), "Ω"),
        (lambda model: change_pieces(model, (490, "a b", NORMAL)), "space that is"),
        (lambda model: change_pieces(model, *without_spaces(model)), "for a space"),
        (
            lambda model: train_plainly(normalization_rule_name="identity", remove_extra_whitespaces=False),
            "every byte",
        ),
    ],
)
def test_the_kernel_says_for_which_vocabularies_it_must_not_encode(changed: Any, obstacle: str) -> None:
    model = train_vocabulary([*make_documents(200), *GREEK_AND_KANA], 500)

    assert obstacle_to_chunks(model) is None
    assert obstacle in str(obstacle_to_chunks(changed(model)))


def test_a_vocabulary_that_the_kernel_must_not_encode_for_goes_to_sentencepiece(tmp_path: Path) -> None:
    model = change_pieces(train_vocabulary(make_documents(200), 500), (490, "streamof", USER_DEFINED))
    (tmp_path / "given.model").write_bytes(model)
    documents = [b"the streamof tokens", *make_documents(60)]
    settings = {"tokenizer__model": str(tmp_path / "given.model"), "model__vocab_size": 500}
    corpus = publish_documents(tmp_path, documents, **settings)

    assert corpus.manifest.corpus.encoder.startswith("sentencepiece ")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert read_stream(corpus.path, "train").documents[0] == [1, *processor.encode(documents[0].decode()), 2]
    assert 490 in read_stream(corpus.path, "train").documents[0]


def test_one_difference_stops_the_stage_with_the_document_and_both_lists_of_ids() -> None:
    """A kernel for another vocabulary stands for a kernel with a bug."""
    model = train_vocabulary(make_documents(200), 500)
    other = ChunkEncoder.from_model(change_pieces(model, (490, "qq", NORMAL)))
    reference = load_reference(model)
    piece = pieces_of(model)[490].replace("\u2581", " ")

    with pytest.raises(DeviceError) as raised:
        CheckedEncoder(other, reference, fuzz_documents(pieces_of(model), 400), SAMPLED_BYTES)

    message = str(raised.value)
    document = message.partition("document  ")[2].partition("\n")[0]
    assert piece.strip() in document
    assert len(document) < 40  # what does not matter was cut away
    (found, _), (expected, _) = (each.encode(TextBatch.of([eval(document).encode()])) for each in (other, reference))
    assert f"found     {found.tolist()}" in message
    assert f"expected  {expected.tolist()}" in message


def test_the_documents_that_come_first_are_compared_too() -> None:
    """Fuzz alone does not find a difference in a word that it never makes."""
    model = train_vocabulary([*make_documents(200), b"zyx zyxwvu zyxwvu " * 400], 500)
    index = pieces_of(model).index("zyxwvu") if "zyxwvu" in pieces_of(model) else pieces_of(model).index("\u2581zyxwvu")
    other = ChunkEncoder.from_model(change_pieces(model, (index, "qqqqqq", NORMAL)))
    checked = CheckedEncoder(other, load_reference(model), [], SAMPLED_BYTES)
    with pytest.raises(DeviceError, match="zyxwvu"):
        checked.encode(TextBatch.of([*make_documents(50), b"once a zyxwvu"]))


def make_ranks(documents: list[bytes], count: int) -> bytes:
    """Make a tiktoken file with ranks for all bytes and for prefixes of the documents' words."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in sorted({word for document in documents for word in document.split()}):
        for piece in (word, b" " + word):
            for end in range(2, len(piece) + 1):
                if len(ranks) < count:
                    ranks.setdefault(piece[:end], len(ranks))
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def test_a_tiktoken_file_gives_tiktokens_ids(tmp_path: Path) -> None:
    """The text holds special tokens, which are encoded as characters."""
    documents = [*make_documents(100), "It's 12345 naïve\r\n\n  かな <|begin_of_text|></s>".encode(), b" ", b"\t\n"]
    ranks = make_ranks(documents, 900)
    (tmp_path / "ranks.tiktoken").write_bytes(ranks)
    settings = {"tokenizer__model": str(tmp_path / "ranks.tiktoken"), "model__vocab_size": 900 + 256}
    corpus = publish_documents(tmp_path, documents, **settings)

    vocabulary = corpus.manifest.corpus.vocabulary
    assert (vocabulary.kind, vocabulary.bos_id, vocabulary.eos_id) == ("tiktoken", 900, 901)
    reference = load_reference(ranks)
    expected, offsets = reference.encode(TextBatch.of(documents))
    stored = read_stream(corpus.path, "train")
    assert np.array_equal(stored.tokens, expected)
    assert stored.starts == offsets[:-1].tolist()
    assert (expected >= 900).sum() == 2 * len(documents)
    fuzz = TextBatch.of(fuzz_documents([], 2_000))
    assert find_difference(FastokensEncoder(ranks, vocabulary), reference, fuzz) is None


def test_a_tokenizer_json_that_fastokens_cannot_read_goes_to_tokenizers(tmp_path: Path) -> None:
    """The vocabulary has a few whole words, with ids of more than 16 bits."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "the": 70_000, "stream": 70_001}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer__model": str(tmp_path / "tokenizer.json"), "model__vocab_size": 70_002}
    corpus = publish_documents(tmp_path, [b"the stream the other"] * 9, **settings)

    assert corpus.manifest.corpus.encoder.startswith("tokenizers ")
    assert read_stream(corpus.path, "train").documents[0] == [1, 70_000, 70_001, 70_000, 0, 2]


COUNT_COMPILATIONS = """
from services.tokenizer.encoding.chunk_encoder import load_kernels
from services.tokenizer.encoding.chunk_kernel import add_pieces, encode_documents
load_kernels("uint16")
print([sum(kernel.stats.cache_misses.values()) for kernel in (encode_documents, add_pieces)])
"""
IMPORTED_LIBRARIES = """
import sys
from services.tokenizer.command import main
code = main(sys.argv[1:])
print(sorted({"numba", "pandas"} & sys.modules.keys()), code)
"""


def run_python(program: str, *argv: str) -> str:
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_a_later_process_compiles_nothing() -> None:
    load_kernels("uint16")
    assert run_python(COUNT_COMPILATIONS) == "[0, 0]\n"


def make_cache(folder: Path) -> KernelCache:
    (folder / "kernel.py").touch()
    return KernelCache.from_function(load_kernels, str(folder / "kernel.py"))


def test_a_change_of_any_module_of_the_folder_makes_code_outdated(tmp_path: Path) -> None:
    stamp = make_cache(tmp_path).get_source_stamp()
    assert make_cache(tmp_path).get_source_stamp() == stamp
    (tmp_path / "called.py").write_text("LIMIT = 1", encoding="utf-8")
    assert make_cache(tmp_path).get_source_stamp() != stamp


def test_a_stage_with_the_reference_encoder_imports_neither_numba_nor_pandas(tmp_path: Path) -> None:
    """Pandas, which pyarrow imports where it can, takes a second of every process."""
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", make_documents(60)))
    argv = ["--recipe", str(recipe), "--root", str(tmp_path / "fsx"), "--launch", "inline"]
    assert run_python(IMPORTED_LIBRARIES, *argv, '--tokenizer.encoder="reference"').endswith("[] 0\n")
    by_kernel = publish(recipe, tmp_path / "kernel").manifest.content_digest
    assert published(tmp_path / "fsx").manifest.content_digest == by_kernel
