"""The tokenizer of an exported folder gives the ids of the corpus's documents through AutoTokenizer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.common.recipe.schema import Tokenizer
from services.common.testing import fork_server
from services.tokenizer.document_hashes import are_for_validation
from services.tokenizer.tests.builders import make_documents, published, read_stream, run, write_documents, write_recipe
from services.tokenizer.tests.tokenizer_folders import FOREIGN, KINDS
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.provision import describe_vocabulary
from services.trainer.conversion.tokenizer import (
    InconvertibleVocabularyError,
    _list_merges,
    make_tokenizer,
    sample_documents,
    write_tokenizer,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE = 1_000
VALIDATION = 0.3
DOCUMENTS = [
    *make_documents(60),
    *[path.read_bytes() for path in sorted((REPOSITORY / "docs").rglob("*.md"))],
    *(f"{text} {number}".encode() for number in range(8) for text in (
        "a </s> that an author typed, <s>, <unk> and <0x0A> <|begin_of_text|><|end_of_text|>",
        "  two spaces before,     five between, \u2581 and two behind  ",
        "e\u0301 \ufb01 ½ naïve かな 👍🏽\r\n\r\n\tdef f(x):\n        return x\0",
        "don'ſ IT'S 1234567 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa hello world",
    )),
]  # fmt: skip
OTHER_TEXT = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "services/common/recipe").glob("*.py"))]
"""Text from which vocabularies are trained; the corpus has other documents."""

Vocabulary = Callable[[], bytes]
LLAMA_2: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    with fork_server.forking_workers():
        yield


def make_sentencepiece(**settings: Any) -> bytes:
    model = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": SIZE,
        "byte_fallback": True,
        "num_threads": 1,
        "minloglevel": 2,
    }
    lines = (line for text in OTHER_TEXT for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **(options | settings))
    return model.getvalue()


def make_byte_level(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(OTHER_TEXT, trainer)
    return tokenizer


def make_json() -> bytes:
    """Make a tokenizer.json with an ordinary added token, with an EOS after each text, and with a truncation."""
    tokenizer = make_byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.add_tokens(["hello world"])
    tokenizer.enable_truncation(10)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end_of_text|>", special_tokens=[("<|end_of_text|>", 1)]
    )
    return str(tokenizer.to_str()).encode()


def make_added() -> bytes:
    """Make a tokenizer.json with added tokens that are not special, as GPT-NeoX, OLMo and Qwen have them."""
    tokenizer = make_byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.add_tokens([AddedToken(" " * size, normalized=True) for size in (2, 4, 8)])
    tokenizer.add_tokens(
        [AddedToken("return x", single_word=True), AddedToken("hello w", lstrip=True, normalized=False)]
    )
    tokenizer.add_special_tokens(["<|im_end|>"])
    return str(tokenizer.to_str()).encode()


def make_tiktoken() -> bytes:
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    ranks = sorted(make_byte_level([]).get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[character] for character in token) for token, _ in ranks]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    return make_corpus(tmp_path_factory.mktemp("llama-2"), make_sentencepiece(**LLAMA_2), SIZE)


def make_corpus(folder: Path, content: bytes, size: int) -> Artifact[CorpusManifest]:
    (folder / "vocabulary").write_bytes(content)
    return tokenize(folder, str(folder / "vocabulary"), size)


def tokenize(folder: Path, model: str, size: int) -> Artifact[CorpusManifest]:
    text = write_documents(folder / "text", DOCUMENTS)
    recipe = write_recipe(
        folder,
        text,
        tokenizer__model=model,
        model__vocab_size=size,
        corpus__validation_fraction=VALIDATION,
        corpus__rows_per_shard=10_000,  # a shard for each few rows would be a thousand files
        tokenizer__encoder="reference",
    )
    assert run(recipe, folder / "fsx") == 0
    return published(folder / "fsx")


def export_tokenizer(folder: Path, corpus: Artifact[CorpusManifest]) -> Path:
    exported = folder / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_tokenizer(exported, corpus, corpus.path / corpus.manifest.corpus.vocabulary.path, imported={})
    return exported


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: make_sentencepiece(**LLAMA_2), SIZE),
        (lambda: make_sentencepiece(**LLAMA_2, add_dummy_prefix=False, control_symbols=["<control>"]), SIZE),
        (lambda: make_sentencepiece(normalization_rule_name="identity"), SIZE),
        (make_json, SIZE + 1),
        (make_added, SIZE + 6),
        (make_tiktoken, SIZE + 256),
    ],
    ids=["sentencepiece", "without-prefix", "without-extra-spaces", "tokenizer_json", "added-tokens", "tiktoken"],
)
def test_auto_tokenizer_gives_the_ids_of_each_validation_document(tmp_path: Path, make: Vocabulary, size: int) -> None:
    corpus = make_corpus(tmp_path, make(), size)

    loaded = transformers.AutoTokenizer.from_pretrained(export_tokenizer(tmp_path, corpus))

    is_validation = are_for_validation(TextBatch.of(DOCUMENTS), VALIDATION)
    texts = [document.decode() for document, is_wanted in zip(DOCUMENTS, is_validation, strict=True) if is_wanted]
    stored = read_stream(corpus.path, "validation").documents
    assert len(stored) == len(texts) > 30
    assert sum("</s>" in text for text in texts) > 0
    eos_id = corpus.manifest.corpus.vocabulary.eos_id
    assert [[*loaded(text).input_ids, eos_id] for text in texts] == stored
    assert (loaded.bos_token_id, loaded.eos_token_id) == (stored[0][0], eos_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folders_tokenizer_is_exported_as_it_is(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    KINDS[kind][0](source)
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    corpus = tokenize(tmp_path, str(source), max(theirs.get_vocab().values()) + 1)

    exported = export_tokenizer(tmp_path, corpus)

    ours = transformers.AutoTokenizer.from_pretrained(exported)
    assert [ours(text).input_ids for text in FOREIGN] == [theirs(text).input_ids for text in FOREIGN]
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    assert before == {path.name: path.read_bytes() for path in exported.iterdir() if path.name != "config.json"}


def test_an_exported_tokenizer_is_that_of_its_own_file(tmp_path: Path) -> None:
    corpus, source = make_corpus(tmp_path, make_added(), SIZE + 6), tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(make_added())
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs = transformers.AutoTokenizer.from_pretrained(source)

    ours = transformers.AutoTokenizer.from_pretrained(export_tokenizer(tmp_path, corpus))

    texts = [text for text in map(bytes.decode, DOCUMENTS) if "<|" not in text]
    expected = [theirs(text).input_ids for text in texts]
    assert [ours(text).input_ids[1:] for text in texts] == expected
    assert set(range(SIZE, SIZE + 5)) <= {token for ids in expected for token in ids}
    assert [ours.decode(ids) for ids in expected] == [theirs.decode(ids) for ids in expected]
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"user_defined_symbols": ["<symbol>"]}, "user-defined"),
        ({"model_type": "unigram"}, "BPE"),
        ({"treat_whitespace_as_suffix": True}, "end of words"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normaliser"),
    ],
)
def test_rules_that_transformers_lacks_are_named(settings: dict[str, Any], reason: str) -> None:
    content = make_sentencepiece(**(LLAMA_2 | settings))
    with pytest.raises(InconvertibleVocabularyError, match=reason):
        make_tokenizer(content, describe_vocabulary(content, Tokenizer(model="any")))


def test_no_tokenizer_is_exported_whose_ids_differ(
    tmp_path: Path, llama_2: Artifact[CorpusManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merges are in another order than that of the scores, as in transformers' own conversion."""
    monkeypatch.setattr(
        "services.trainer.conversion.tokenizer._list_merges",
        lambda normal, scores: list(reversed(_list_merges(normal, scores))),
    )

    exported = export_tokenizer(tmp_path, llama_2)

    assert "expected [" in (exported / "NO_TOKENIZER.txt").read_text()
    assert not (exported / "tokenizer.json").exists()
    vocabulary = llama_2.path / llama_2.manifest.corpus.vocabulary.path
    assert (exported / "vocabulary" / "tokenizer.model").read_bytes() == vocabulary.read_bytes()
    with pytest.raises(ValueError, match="tokenizer"):
        transformers.AutoTokenizer.from_pretrained(exported)


def test_the_checked_documents_are_whole_and_spread_over_the_split(llama_2: Artifact[CorpusManifest]) -> None:
    stored = read_stream(llama_2.path, "validation").documents

    everything = list(sample_documents(llama_2, "validation", max_tokens=10**9))
    a_third = list(sample_documents(llama_2, "validation", max_tokens=sum(map(len, stored)) // 3 + 1))

    assert [ids.tolist() for ids in everything] == stored
    assert [ids.tolist() for ids in a_third] == stored[::3]
