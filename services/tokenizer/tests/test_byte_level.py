"""The chunk kernel gives the ids of `tokenizers` for byte-level vocabularies, for any text and whatever came before."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from services.common.recipe.schema import Source, Tokenizer
from services.common.testing.seeds import draw_seed
from services.common.vocabularies.fuzz import fuzz_documents
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN
from services.tokenizer.encoding.byte_level import QWEN_PATTERN, ByteLevelEncoder, classify_characters, load_byte_level
from services.tokenizer.encoding.chunk_tables import CACHED_BYTES, UNKNOWN
from services.tokenizer.encoding.encoder import find_difference
from services.tokenizer.encoding.encoder_choice import ReferenceEncoder
from services.tokenizer.sources.python_docs import URI
from services.tokenizer.tests.builders import read_all
from services.tokenizer.tests.tokenizer_folders import ALPHABET, DOCUMENTS
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.provision import describe_vocabulary

KINDS = {  # pattern, whether pieces are whole, whether it has NFC and an added token
    "Llama 3": (LLAMA3_PATTERN, True, False),
    "Llama 3 by merges": (LLAMA3_PATTERN, False, False),
    "Qwen": (QWEN_PATTERN, False, True),
}
LETTERS = ["a", "B", "'", "'", "s", "S", "re", "LL", "l", "v", "é", "\u017f", "漢", "1", "23", "٣", "½"]
MARKS = [*"  \n\n\t\u00a0\u2028\x85(+—👍\x00\x1c\u0301", "  ", "\r\n"]


@functools.cache
def documentation() -> list[str]:
    return [document.encode().decode() for document in read_all(Source(uri=URI), 2**20, invalid_utf8="replace")]


@functools.cache
def train() -> str:
    """Train 20,000 pieces of half of the documentation, between spaces."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    special = ["<s>", "</s>"]
    trainer = BpeTrainer(vocab_size=20_000, max_token_length=64, special_tokens=special, initial_alphabet=ALPHABET)
    tokenizer.train_from_iterator(documentation()[::2] + DOCUMENTS, trainer)
    return tokenizer.to_str()


def make(kind: str) -> tokenizers.Tokenizer:
    """Make a tokenizer of the trained pieces with another pattern. Of some pieces that are whole, no merge is left."""
    pattern, are_whole, is_qwen = KINDS[kind]
    fields = json.loads(train())
    fields["model"]["ignore_merges"] = are_whole
    if are_whole:
        del fields["model"]["merges"][49::50]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if is_qwen:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens(["<think>"])
    return tokenizer


@functools.cache
def load(folder: Path, kind: str) -> tuple[ByteLevelEncoder, ReferenceEncoder]:
    make(kind).save(str(path := folder / "tokenizer.json"))
    vocabulary = describe_vocabulary(path.read_bytes(), Tokenizer(model="any"))
    encoder = load_byte_level(path.read_bytes(), vocabulary)
    assert isinstance(encoder, ByteLevelEncoder)
    return encoder, ReferenceEncoder(path, vocabulary)


def every_character(is_nfc: bool) -> list[str]:
    """Return all characters in several places. A document with one of class UNKNOWN has no others than these."""
    in_use = np.array([*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 61)])
    is_known = classify_characters(is_nfc)[in_use] != UNKNOWN
    both = (map(chr, in_use[is_known]), map(chr, in_use[~is_known]))
    texts = [[f"a{each}b '{each}{each}1{each} 's{each}\n {each}  {each}" for each in some] for some in both]
    return ["".join(some[begin : begin + 256]) for some in texts for begin in range(0, len(some), 256)]


def long_runs() -> list[str]:
    runs = [" ", "\n", " \n", "a", "é", "漢", "1", "٣", "(", "'s", "'", "ab1 ", "\t", "\u00a0", "(\n"]
    sizes = [*range(60, 68), CACHED_BYTES, CACHED_BYTES + 1, 10_000]
    behind = ["+-=<>%&|^~;:" + "\0" * size for size in (0, 256)]  # 256 is the mark of entries with ids elsewhere
    return [around + run * size + around for run in runs for size in sizes for around in ("", " y")] + behind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["documentation", "fuzz", "short pretokens", "every character", "long runs"])
def test_ids_are_those_of_tokenizers(tmp_path_factory: pytest.TempPathFactory, kind: str, text: str) -> None:
    encoder, reference = load(tmp_path_factory.getbasetemp(), kind)
    chosen = random.Random(draw_seed())
    characters = [LETTERS, MARKS, LETTERS + MARKS] * 1_000
    documents = {
        "documentation": lambda: documentation()[1:300:2] + DOCUMENTS,
        "fuzz": lambda: [each.decode() for each in fuzz_documents(list(make(kind).get_vocab()), 800, draw_seed())],
        "short pretokens": lambda: ["".join(chosen.choices(some, k=chosen.randrange(200))) for some in characters],
        "every character": lambda: every_character(is_nfc=KINDS[kind][2]),
        "long runs": long_runs,
    }[text]()
    batch = TextBatch.of([document.encode() for document in documents])
    for full in (False, True, False):  # the table has the chunks at the second time, and is emptied before the third
        assert find_difference(encoder, reference, batch) is None
        assert np.mean(np.diff(encoder._chunks.encode(batch)[1]) > 0) > 0.2  # fastokens takes the rest
        encoder._chunks._cache.used[0] += 2**30 * full
