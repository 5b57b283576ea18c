"""Text on which tokenizers have bugs, for comparing an encoder with the library that defines a vocabulary's ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts.corpus import Vocabulary

_CONTROL_TEXT = ("<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "[INST]", "<|begin_of_text|>", "<|end_of_text|>")
_SPACES = (" ", "  ", "   ", " " * 15, " " * 16, " " * 33)
_WHITESPACE = (*_SPACES, "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2581", "\u2581\u2581")
# Ranges of code points: Latin with accents, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Han, Hangul,
# symbols, emoji, supplementary planes, combining marks, control characters, private use and noncharacters.
_SCRIPTS = (
    *((0x20, 0x7F), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939)),
    *((0xE01, 0xE3A), (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x2000, 0x2BFF), (0x1F300, 0x1FAFF)),
    *((0x10000, 0x1FFFF), (0x300, 0x36F), (0x0, 0x1F), (0xE000, 0xFFFD), (0xFDD0, 0xFDEF), (0x10FFF0, 0x10FFFF)),
)


def fuzz_of_vocabulary(path: Path, vocabulary: Vocabulary, count: int) -> list[bytes]:
    """Make fuzz for a vocabulary's file: `count` random documents, and each of its added tokens in several places."""
    match vocabulary.kind:
        case "sentencepiece":
            pieces, added = _read_sentencepiece(path.read_bytes())
        case "tokenizer_json":
            pieces, added = _read_tokenizer_json(path.read_bytes())
        case "hugging_face":
            from services.common.vocabularies.hugging_face import load_folder  # noqa: PLC0415

            tokenizer = load_folder(path.parent)
            pieces = sorted(map(str, tokenizer.get_vocab()))
            added = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items())]
        case "tiktoken":
            from services.common.vocabularies.tiktoken_file import LLAMA3_SPECIAL_TOKENS  # noqa: PLC0415

            pieces, added = [], list(LLAMA3_SPECIAL_TOKENS)
    return _place(added) + fuzz_documents([*pieces, *added], count)


def fuzz_documents(pieces: Sequence[str], count: int, seed: int = 0) -> list[bytes]:
    """Make documents of random pieces, characters of all scripts, unknown ones, long repetitions, and special tokens.

    Equal arguments give equal documents.
    """
    chosen = random.Random(seed)
    return [_fuzz(pieces, chosen).encode() for _ in range(count)]


def _read_sentencepiece(content: bytes) -> tuple[list[str], list[str]]:
    from services.common.vocabularies.sentencepiece_model import PieceKind, load_model, read_settings  # noqa: PLC0415

    processor, kinds = load_model(content), read_settings(content).piece_kinds
    pieces = [str(processor.id_to_piece(index)) for index in range(len(kinds))]
    added = [index for index, kind in enumerate(kinds) if kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED)]
    return pieces, [pieces[index] for index in added]


def _read_tokenizer_json(content: bytes) -> tuple[list[str], list[str]]:
    from services.common.vocabularies.tokenizer_json import read_added_tokens  # noqa: PLC0415

    vocab = json.loads(content)["model"]["vocab"]
    pieces = list(vocab) if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    return pieces, [token.content for token in read_added_tokens(content)]


def _place(added: Sequence[str]) -> list[bytes]:
    """Return documents with each added token alone, repeated, within words and lines, and beside the next one."""
    return [
        text.encode()
        for token, following in zip(added, [*added[1:], *added[:1]], strict=True)
        for text in (
            *(token, f"{token}{token} {token}", f"a{token}b", f"a {token}\nb  {token}\t{token}  c"),
            *(f"{token}{following} {following}{token}", f"{token.upper()}{token[:-1]}{following[1:]}{token.lower()}."),
        )
    ]


def _fuzz(pieces: Sequence[str], chosen: random.Random) -> str:
    parts: list[str] = []
    script = chosen.choice(_SCRIPTS)
    for _ in range(chosen.choice((0, 1, 2, 5, 10, 30))):
        match chosen.randrange(8):
            case 0 | 1 | 2 if pieces:
                part = chosen.choice(pieces).replace("\u2581", chosen.choice((" ", "", "\u2581")))
            case 3:
                part = chosen.choice(_CONTROL_TEXT)
            case 4:
                part = chosen.choice(_WHITESPACE)
            case 5:
                script = chosen.choice(_SCRIPTS)
                part = chr(chosen.randint(*script))
            case 6:
                part = str(chosen.randrange(10 ** chosen.randint(1, 12)))
            case _:
                part = "".join(chr(chosen.randint(*script)) for _ in range(chosen.randint(1, 6)))
        parts.append(part * chosen.choice((1, 1, 1, 1, 1, 2, 3, 40)))
    return "".join(parts)
