"""Makes Hugging Face's tokenizer of a vocabulary, and compares its ids with those of the vocabulary's own library.

transformers builds tokenizers of its own from `tokenizer.model` and tiktoken files. Those of SentencePiece models give
other ids: version 5 orders the merges by id instead of by score, and does not double a leading space. So the whole
pipeline is written to `tokenizer.json`, which every version of transformers loads as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.common.artifacts.corpus import Vocabulary
from services.common.vocabularies.codec import Codec
from services.common.vocabularies.sentencepiece_model import PieceKind, SentencePieceSettings, load_model, read_settings
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, read_ranks
from services.common.vocabularies.tokenizer_json import load_tokenizer

_SPACE_PIECE = "\u2581"
_SHOWN_CHARACTERS = 200


class InconvertibleVocabularyError(Exception):
    """The tokenizers library cannot give a vocabulary's ids. The message is the reason, a whole sentence."""


def make_tokenizer(content: bytes, vocabulary: Vocabulary) -> Tokenizer:
    """Make the tokenizer of a vocabulary's file, which puts BOS before a text, and no EOS after it.

    `find_difference` must confirm its ids. Raises `InconvertibleVocabularyError` for a vocabulary whose rules the
    tokenizers library does not have.
    """
    match vocabulary.kind:
        case "sentencepiece":
            tokenizer = _from_sentencepiece(content)
        case "tokenizer_json":
            tokenizer = load_tokenizer(content)
        case "tiktoken":
            tokenizer = _from_tiktoken(content)
    bos = tokenizer.id_to_token(vocabulary.bos_id)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{bos}:0", "$A:0"],
        pair=[f"{bos}:0", "$A:0", f"{bos}:1", "$B:1"],
        special_tokens=[(bos, vocabulary.bos_id)],
    )
    tokenizer.encode_special_tokens = True  # not stored in the file: `tokenizer_config` says it again
    return tokenizer


def tokenizer_config(
    tokenizer: Tokenizer, vocabulary: Vocabulary, sequence_length: int, imported: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `tokenizer_config.json`, by which AutoTokenizer loads the tokenizer and leaves it unchanged.

    The name of a special token in a text is encoded as text, as in the corpus (`split_special_tokens`). The settings of
    an imported tokenizer stay, this one too, except for those that would build another tokenizer than the corpus's.
    """
    own: dict[str, Any] = {
        "eos_token": tokenizer.id_to_token(vocabulary.eos_id),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": sequence_length,
    }
    if unknown := getattr(tokenizer.model, "unk_token", None):
        own["unk_token"] = unknown
    if imported:
        own |= {name: value for name, value in imported.items() if name not in _BUILD_ANOTHER_TOKENIZER}
        if own["model_max_length"] is not None:  # without a limit
            own["model_max_length"] = max(own["model_max_length"], sequence_length)
        if added := _tokens_beyond(tokenizer, imported):
            own["added_tokens_decoder"] = added
    else:
        own["split_special_tokens"] = True
    return own | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(vocabulary.bos_id),
        "add_bos_token": True,
        "add_eos_token": False,
    }


_BUILD_ANOTHER_TOKENIZER = (
    "add_prefix_space",
    "added_tokens_decoder",
    "auto_map",
    "backend",
    "fix_mistral_regex",
    "from_slow",
    "is_local",
    "legacy",
    "local_files_only",
    "name_or_path",
    "sp_model_kwargs",
    "tokenizer_file",
    "tokenizer_type",
    "vocab_file",
)


def _tokens_beyond(tokenizer: Tokenizer, imported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the imported tokens that the tokenizer has not, such as a `<pad>` in a row of the model's padding."""
    added: dict[str, Any] = imported.get("added_tokens_decoder") or {}
    return {number: token for number, token in added.items() if tokenizer.token_to_id(token["content"]) is None}


def find_difference(tokenizer: Tokenizer, codec: Codec, bos_id: int, texts: Iterable[str]) -> str | None:
    """Return a sentence about the first text whose ids differ from BOS and the codec's ids, or None."""
    for text in texts:
        found, expected = tokenizer.encode(text).ids, [bos_id, *codec.encode(text)]
        if found != expected:
            at = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(found), len(expected)) if at is None else at
            shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            return (
                f"tokenizers {tokenizers.__version__} encodes a text with other ids than the vocabulary's library: "
                f"from position {at:,} on {found[at : at + 8]}, expected {expected[at : at + 8]}, in {shown!r}."
            )
    return None


def _from_sentencepiece(content: bytes) -> Tokenizer:
    settings, processor = read_settings(content), load_model(content)
    ids = range(processor.vocab_size())
    pieces = [str(processor.id_to_piece(index)) for index in ids]
    special = [index for index in ids if processor.is_control(index) or processor.is_unknown(index)]
    is_normal = {index: not processor.is_byte(index) for index in ids} | dict.fromkeys(special, False)
    normal = {piece: index for index, piece in enumerate(pieces) if is_normal[index]}
    has_bytes = any(processor.is_byte(index) for index in ids)
    _require_convertible(settings, normal, any(processor.is_unused(index) for index in ids))
    scores = {index: float(processor.get_score(index)) for index in normal.values()}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=_list_merges(normal, scores),
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(list(_normalize(settings)))
    undo_prefix = [decoders.Strip(" ", 1, 0)] if settings.adds_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_PIECE, " "), decoders.ByteFallback(), decoders.Fuse(), *undo_prefix]
    )
    tokenizer.add_special_tokens([AddedToken(pieces[index], special=True, normalized=False) for index in special])
    return tokenizer


def _require_convertible(settings: SentencePieceSettings, normal: Mapping[str, int], has_unused: bool) -> None:
    without_piece = sorted({character for piece in normal for character in piece} - normal.keys())
    checks = [
        (settings.is_bpe, "The SentencePiece model is not a BPE model."),
        (not settings.puts_whitespace_last, "The SentencePiece model writes spaces at the end of words."),
        (PieceKind.USER_DEFINED not in settings.piece_kinds, "The SentencePiece model has user-defined pieces."),
        (not has_unused, "The SentencePiece model has unused pieces."),
        (not without_piece, f"The characters {without_piece[:3]} of SentencePiece pieces are no pieces themselves."),
        # normalizers.Precompiled applies the table to grapheme clusters, and gives other text for some of them.
        (not settings.changes_characters, "The normaliser of the SentencePiece model replaces characters."),
    ]
    for holds, reason in checks:
        if not holds:
            raise InconvertibleVocabularyError(f"{reason} The tokenizers library has no equal rule.")


def _list_merges(normal: Mapping[str, int], scores: Mapping[int, float]) -> list[tuple[str, str]]:
    """List all pairs of pieces whose concatenation is a piece, in the order in which SentencePiece merges them."""
    merges = []
    for piece, index in normal.items():
        for cut in range(1, len(piece)):
            left, right = normal.get(piece[:cut]), normal.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], index, left, right, piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(merges)]


def _normalize(settings: SentencePieceSettings) -> Iterator[normalizers.Normalizer]:
    if settings.removes_extra_whitespaces:
        # At the end of a text, SentencePiece removes the character that it writes for a space, too.
        at_end = f"[ {_SPACE_PIECE}]" if settings.escapes_whitespaces else " "
        yield normalizers.Replace(Regex(rf"\A +|{at_end}+\z"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if settings.adds_dummy_prefix:
        yield normalizers.Prepend(" ")
    if settings.escapes_whitespaces:
        yield normalizers.Replace(" ", _SPACE_PIECE)


def _from_tiktoken(content: bytes) -> Tokenizer:
    ranks = read_ranks(content)
    characters = _byte_characters()
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], names[token[:cut]], names[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={names[token]: rank for token, rank in ranks.items()},
            merges=[(left, right) for *_, left, right in sorted(merges)],
            ignore_merges=True,  # a word that is a token is that token, whatever its merges give
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLAMA3_SPECIAL_TOKENS])
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the printable character for each byte: `bytes_to_unicode` of GPT-2's encoder.py (openai/gpt-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
