"""Added tokens of a tokenizer.json have the ids that the unchanged file gives; names of special ones stay text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from services.common.artifacts.corpus import Vocabulary
from services.common.errors import ArtifactError
from services.common.recipe.schema import Tokenizer
from services.common.vocabularies.codec import load_codec
from services.common.vocabularies.fuzz import fuzz_documents, fuzz_of_vocabulary
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN
from services.tokenizer.encoding.encoder import CheckedEncoder
from services.tokenizer.encoding.encoder_choice import load_encoder
from services.tokenizer.tests.builders import make_documents
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.provision import describe_vocabulary

CONTROL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def token(content: str, *flags: str) -> AddedToken:
    return AddedToken(content, **{"normalized": False, **dict.fromkeys(flags, True)})


def train(tokenizer: tokenizers.Tokenizer, trainer: Callable[..., Any], **settings: Any) -> str:
    texts = [document.decode() for document in make_documents(60)]
    tokenizer.train_from_iterator(texts, trainer(special_tokens=CONTROL, show_progress=False, **settings))
    return tokenizer.to_str()


@functools.cache
def make(kind: str) -> str:
    """Make a tokenizer.json of a kind, with special tokens alone."""
    alphabet, size = pre_tokenizers.ByteLevel.alphabet(), 500
    match kind:
        case "GPT-2":
            tokenizer = tokenizers.Tokenizer(models.BPE())
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            return train(tokenizer, trainers.BpeTrainer, vocab_size=size, initial_alphabet=alphabet)
        case "Llama 3":
            tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
            return train(tokenizer, trainers.BpeTrainer, vocab_size=size, initial_alphabet=alphabet)
        case "Llama 2":
            tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
            return train(tokenizer, trainers.BpeTrainer, vocab_size=size, initial_alphabet=list("</s>|unkimd_"))
        case "T5":
            tokenizer = tokenizers.Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
            return train(tokenizer, trainers.UnigramTrainer, vocab_size=200, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return train(tokenizer, trainers.WordPieceTrainer, vocab_size=300)


ADDED = {
    "runs of spaces, as in GPT-NeoX and OLMo": [token(" " * size, "normalized") for size in (2, 3, 4, 8, 24)],
    "names, as in Qwen": [token("<think>"), token("</think>"), token("<tool_call>")],
    "words in normalized text": [token("Nothing", "normalized"), token("é", "normalized"), token("the stream")],
    "lstrip": [token("<think>", "lstrip"), token("\n\n", "lstrip")],
    "rstrip": [token("<think>", "rstrip"), token("nothing", "rstrip")],
    "single_word": [token("the", "single_word"), token("lost", "single_word", "normalized")],
    "both kinds of normalized": [token("  ", "normalized"), token("<think>")],
    "both kinds that overlap": [token("  "), token("    ", "normalized"), token("a<t"), token("<t>", "normalized")],
    "special ones with flags": [token("<mask>", "lstrip", "special"), token("<think>")],
    "beside special ones": [token("</s></s>"), token("<|im"), token(" <s>")],
}
FAST = {
    *("runs of spaces, as in GPT-NeoX and OLMo", "names, as in Qwen", "special ones with flags"),
    *("both kinds of normalized", "words in normalized text"),
}
TEXTS = [
    *("a  b   c        d" + " " * 50 + "e", "\tif x:\n        return  y\n\n\n    z", "  ", " ", "", "\n\n \n\n\n"),
    *("<think>why</think> <think> why </think>", "the lost, lostthe lost", "NOTHING nothing Nothing é e\u0301 É"),
    *("a<t> <t>", "the stream <tool_call> the  stream", "<think><think>\n<think>  <mas"),
]

CONTROL_TEXTS = [
    *(*CONTROL, "<mask>", "a </s></s> b<s>  <|im_end|>", "<s><think></s>", "    </s>    <mask>", " <s> <|im <s>"),
]


def load(folder: Path, kind: str, added: str) -> tuple[Path, Vocabulary, CheckedEncoder]:
    """Write a tokenizer.json with added tokens, and load its encoder as the stage does."""
    made = tokenizers.Tokenizer.from_str(make(kind))
    for each in ADDED[added]:
        (made.add_special_tokens if each.special else made.add_tokens)([each])
    path = folder / "tokenizer.json"
    made.save(str(path))
    vocabulary = describe_vocabulary(path.read_bytes(), Tokenizer(model="any"))
    return path, vocabulary, load_encoder(path, vocabulary, Tokenizer(model="any"))


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "Llama 2", "T5", "BERT"])
def test_ids_are_those_of_the_unchanged_file_and_names_of_special_tokens_are_text(
    tmp_path: Path, kind: str, added: str
) -> None:
    path, vocabulary, encoder = load(tmp_path, kind, added)
    codec, unchanged = load_codec(path, vocabulary), tokenizers.Tokenizer.from_file(str(path))
    random = fuzz_documents([each.content for each in ADDED[added] if not each.special] * 9, 300)
    texts = [text for text in (*TEXTS, *(document.decode() for document in random)) if not has_control(text)]
    assert len(texts) > 100

    ids, offsets = encoder.encode(TextBatch.of([text.encode() for text in texts]))
    expected = [unchanged.encode(text, add_special_tokens=False).ids for text in texts]
    found = [ids[begin:end].tolist()[1:-1] for begin, end in pairwise(offsets)]
    assert found == expected == [codec.encode(text) for text in texts]
    assert added == "beside special ones" or unchanged.token_to_id(ADDED[added][-1].content) in ids
    is_fast = encoder.name.startswith(("fastokens", "chunk kernel"))
    assert is_fast == (kind in ("GPT-2", "Llama 3", "Llama 2") and added in FAST)
    if kind != "T5":  # its model has them as pieces of text
        control = {unchanged.token_to_id(name) for name in (*CONTROL[1:], "<mask>")} - {None}
        ids, _ = encoder.encode(TextBatch.of([text.encode() for text in CONTROL_TEXTS]))
        in_text = ids[(ids != vocabulary.bos_id) & (ids != vocabulary.eos_id)]
        assert len(ids) - len(in_text) == 2 * len(CONTROL_TEXTS)
        assert not control & set(in_text.tolist())


def has_control(text: str) -> bool:
    return any(name in text for name in (*CONTROL, "<mask>"))


def test_the_model_that_has_a_special_token_as_a_piece_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for kind, is_warned in (("GPT-2", False), ("T5", True)):
        caplog.clear()
        describe_vocabulary(make(kind).encode(), Tokenizer(model="any"))
        assert ("</s>" in caplog.text) == is_warned


def test_each_added_token_is_in_the_fuzz_of_the_self_check(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(make("GPT-2"))
    names = [f"<unused{number}>" for number in range(1_000)] + [" " * size for size in range(2, 30)]
    made.add_tokens([token(name) for name in names])
    content, path = made.to_str().encode(), tmp_path / "tokenizer.json"
    path.write_bytes(content)

    fuzz = fuzz_of_vocabulary(path, describe_vocabulary(content, Tokenizer(model="any")), 400)

    encoded = made.encode_batch([document.decode() for document in fuzz])
    assert {made.token_to_id(name) for name in (*names, *CONTROL)} <= {each for text in encoded for each in text.ids}


def test_added_tokens_on_which_the_library_fails_are_refused_before_anything_starts() -> None:
    made = tokenizers.Tokenizer.from_str(make("GPT-2"))
    made.add_tokens([token("<think>", "rstrip"), token("  ")])
    with pytest.raises(ArtifactError) as refused:
        describe_vocabulary(made.to_str().encode(), Tokenizer(model="any"))
    assert all(name in str(refused.value) for name in ("'<think>'", "'  '"))
