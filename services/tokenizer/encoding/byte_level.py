"""The fast encoders for byte-level BPE such as Llama 3's, whose vocabularies are `tokenizer.json` or tiktoken files.

Python's Unicode is older than the reference's. So characters that Python does not know, and those of which one can
change beside another under NFC, are of class UNKNOWN: fastokens takes the documents that have one.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tempfile
import unicodedata
from functools import lru_cache
from pathlib import Path

import fastokens
import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Vocabulary
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN, read_ranks
from services.common.vocabularies.tokenizer_json import read_added_tokens
from services.tokenizer.encoding.chunk_encoder import ChunkEncoder
from services.tokenizer.encoding.chunk_tables import (
    CACHED_BYTES,
    LETTER,
    NUMBER,
    OTHER,
    SPACE,
    UNKNOWN,
    ChunkTables,
    find_merges,
    merge_tables,
)
from services.tokenizer.encoding.encoder import Encoder, Offsets, TokenIds, join_documents, token_dtype
from services.tokenizer.text_batch import TextBatch

QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_MAX_DIGITS = {LLAMA3_PATTERN: 3, QWEN_PATTERN: 1}
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHARACTER = {byte: byte for byte in _PRINTABLE} | {256 + n: byte for n, byte in enumerate(_OTHERS)}
_ASSIGNED = 0x40000  # in the planes behind, characters are for private use, if they are any
_JOINING_JAMO = slice(0x1160, 0x1200)


class FastokensEncoder:
    """fastokens, at 6 times tiktoken's speed. It uses all cores of the machine."""

    def __init__(self, content: bytes, vocabulary: Vocabulary) -> None:
        """Raises `ValueError` for a vocabulary that fastokens does not read."""
        self._tokenizer, self._vocabulary = _load(content, vocabulary), vocabulary
        self.name = f"fastokens {importlib.metadata.version('fastokens')}"

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        texts = [document.decode() for document in batch.documents()]
        flat, ends = self._tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        ids, offsets = np.frombuffer(flat, np.uint32), np.frombuffer(ends, np.uint64).astype(np.int64)
        return join_documents(np.split(ids, offsets[1:-1]) if texts else [], self._vocabulary)


class ByteLevelEncoder:
    """The chunk kernel. Another encoder takes the documents with added tokens, or with characters of class UNKNOWN."""

    name = ChunkEncoder.name

    def __init__(self, chunks: ChunkEncoder, other: Encoder, added: list[str]) -> None:
        self._chunks, self._other = chunks, other
        names = {form.encode() for token in added for form in (token, unicodedata.normalize("NFC", token))}
        self._added = re.compile(b"|".join(map(re.escape, sorted(names)))) if names else None

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        ends = batch.ends.copy()
        for match in self._added.finditer(batch.text.data) if self._added else ():
            first = np.searchsorted(batch.ends, match.start(), "right")
            last = np.searchsorted(batch.begins, match.end())
            ends[first:last] = batch.begins[first:last]
        ids, offsets = self._chunks.encode(TextBatch(batch.text, batch.begins, ends))
        sizes = np.diff(offsets)
        is_left = (sizes == 0) & (batch.sizes > 0)
        if is_left.any():
            left_ids, left_offsets = self._other.encode(batch.select(is_left))
            sizes[is_left] = np.diff(left_offsets)
            ids = np.insert(ids, np.repeat(offsets[:-1][is_left], sizes[is_left]), left_ids)
            offsets = np.append(0, np.cumsum(sizes))
        return ids, offsets


def load_byte_level(content: bytes, vocabulary: Vocabulary) -> Encoder | str:
    """Load the fastest encoder for a vocabulary, or return why it has none, as the end of a sentence with "because"."""
    try:
        encoder = FastokensEncoder(content, vocabulary)
    except ValueError as error:
        return f"fastokens cannot read the tokenizer file ({error})"
    is_json = vocabulary.kind != "tiktoken"
    if is_json and (obstacle := obstacle_to_fastokens(content)):
        return obstacle
    if (chunks := _load_chunk_encoder(content, vocabulary)) is None:
        return encoder
    matched = [token.content for token in read_added_tokens(content) if not token.special] if is_json else []
    return ByteLevelEncoder(chunks, encoder, matched)


def _load_chunk_encoder(content: bytes, vocabulary: Vocabulary) -> ChunkEncoder | None:
    """Load the encoder, or return None for a vocabulary that the kernel must not encode for."""
    max_digits, are_whole, is_nfc = 3, True, False
    if vocabulary.kind == "tiktoken":
        pieces = read_ranks(content)
        merges = find_merges(pieces, pieces.values())
    else:
        fields = json.loads(content)
        model, normalizer = fields["model"], fields.get("normalizer")
        match fields.get("pre_tokenizer"):
            case {
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ]
            } if pattern in _MAX_DIGITS:
                max_digits = _MAX_DIGITS[pattern]
            case _:
                return None
        unknown = [model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")]
        if normalizer not in (None, {"type": "NFC"}) or model.get("type") != "BPE" or any(unknown):
            return None
        are_whole, is_nfc, vocab = bool(model.get("ignore_merges")), normalizer is not None, model["vocab"]
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merges = {vocab[a] << 32 | vocab[b]: rank << 32 | vocab[a + b] for rank, (a, b) in enumerate(pairs)}
        characters = set(map(chr, _BYTE_OF_CHARACTER))
        in_bytes = {piece: index for piece, index in vocab.items() if piece and characters.issuperset(piece)}
        pieces = {piece.translate(_BYTE_OF_CHARACTER).encode("latin-1"): index for piece, index in in_bytes.items()}
    in_order = [pieces.get(bytes([byte])) for byte in range(256)]
    if None in in_order or max(map(len, pieces)) > CACHED_BYTES:
        return None
    id_of_byte = np.array(in_order, np.int32)
    tables = ChunkTables(
        is_soft=np.zeros(0, np.uint8),
        pairs_of_characters=np.zeros(0, np.int64),
        id_of_code_point=np.zeros(0, np.int32),
        id_of_byte=id_of_byte,
        max_digits=max_digits,
        classes=classify_characters(is_nfc),
        **merge_tables(merges, id_of_byte),
    )
    dtype = np.dtype(token_dtype(vocabulary.vocab_size))
    return ChunkEncoder(tables, vocabulary.bos_id, vocabulary.eos_id, False, dtype, pieces, are_whole)


@lru_cache
def classify_characters(is_nfc: bool) -> npt.NDArray[np.uint8]:
    """Return the class of every character, for `ChunkTables.classes`."""
    kinds = {"L": LETTER, "N": NUMBER, "Z": SPACE, "M": UNKNOWN if is_nfc else OTHER}
    classes = np.full(0x200000, UNKNOWN, np.uint8)
    for code_point, character in enumerate(map(chr, range(_ASSIGNED))):
        category = unicodedata.category(character)
        if category != "Cn" and not (is_nfc and not unicodedata.is_normalized("NFC", character)):
            classes[code_point] = kinds.get(category[0], OTHER)
    classes[[ord(each) for each in "\t\n\v\f\r\x85"]] = SPACE
    if is_nfc:
        classes[_JOINING_JAMO] = UNKNOWN
    return classes


def _load(content: bytes, vocabulary: Vocabulary) -> fastokens.Tokenizer:
    if vocabulary.kind == "tiktoken":
        with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
            path = Path(folder) / "tokenizer.tiktoken"
            path.write_bytes(content)
            return fastokens.Tokenizer.from_tiktoken(str(path), pattern=LLAMA3_PATTERN, special_tokens={})
    tokenizer = fastokens.Tokenizer.from_json_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def obstacle_to_fastokens(tokenizer: bytes) -> str | None:
    """Return why fastokens must not encode for a tokenizer.json, as the end of a sentence with "because", or None.

    Beside these obstacles, fastokens 0.3.5 agreed with tokenizers 0.23 on fuzz of a thousand random vocabularies.
    """
    added = read_added_tokens(tokenizer)
    matched = [token for token in added if not token.special]
    flagged = [token.content for token in matched if token.lstrip or token.rstrip or token.single_word]
    if flagged:
        return f"the added token {flagged[0]!r} has lstrip, rstrip or single_word"
    for token in matched:
        for other in added:
            # tokenizers finds tokens of the other kind in another pass, and a special one hides what it covers.
            is_apart = other.special or other.normalized != token.normalized
            if is_apart and _can_overlap(token.content, other.content):
                return f"the added tokens {token.content!r} and {other.content!r} can overlap"
    fields = json.loads(tokenizer)
    vocab = fields["model"]["vocab"]
    if isinstance(vocab, dict) and '"ByteLevel"' not in json.dumps(fields.get("pre_tokenizer")):
        # fastokens finds such a piece in a text, `</s>` too, although no merges lead to it.
        for piece in vocab:
            if any(character not in vocab for character in piece):
                return f"the model has no pieces for the characters of {piece!r}"
    return None


def _can_overlap(first: str, second: str) -> bool:
    """Return whether a text can hold the two with a character in common."""
    if first in second or second in first:
        return True
    sizes = range(1, min(len(first), len(second)))
    return any(first.endswith(second[:size]) or second.endswith(first[:size]) for size in sizes)
