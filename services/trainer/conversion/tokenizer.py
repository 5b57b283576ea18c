"""Makes Hugging Face's tokenizer of a vocabulary, and exports it once its ids are those of the corpus.

The files of a corpus that was made with a tokenizer of Hugging Face are handed on as they are.

transformers builds tokenizers of its own from `tokenizer.model`. Those give other ids: version 5 orders the merges by
id instead of by score, and does not double a leading space. So the whole pipeline is written to `tokenizer.json`, which
every version of transformers loads as it is; and `tokenizer_config.json` names a class that every version has.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from services.common.artifacts.corpus import CorpusManifest, Split, Vocabulary, VocabularyKind
from services.common.artifacts.corpus_rows import map_files
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError, RecipeError
from services.common.vocabularies.codec import Codec, load_codec
from services.common.vocabularies.fuzz import fuzz_of_vocabulary
from services.common.vocabularies.hugging_face import find_bos_and_eos, load_folder
from services.common.vocabularies.sentencepiece_model import PieceKind, SentencePieceSettings, load_model, read_settings
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, read_ranks
from services.common.vocabularies.tokenizer_json import load_tokenizer
from services.trainer.conversion.configuration import CONFIG, TOKENIZER_CONFIG

TOKENIZER = "tokenizer.json"
NO_TOKENIZER = "NO_TOKENIZER.txt"
"""File with the reason why a folder has no tokenizer."""
VOCABULARY_FOLDER = "vocabulary"
"""Folder of the vocabulary's file if there is no tokenizer, where transformers does not find the file."""
FUZZ_TEXTS = 1_000
CHECKED_TOKENS = 2**20
"""Number of validation tokens, in whole documents, that are encoded again: 5 seconds."""
_FORMS: dict[str, VocabularyKind] = {
    "tokenizer.json": "tokenizer_json",
    "tokenizer.model": "sentencepiece",
    "tokenizer.tiktoken": "tiktoken",
}
"""Kinds of the tokenizers that are one file, by its usual name."""
_SPACE_PIECE = "\u2581"
_SHOWN_CHARACTERS = 200
_BUILD_ANOTHER_TOKENIZER = {
    "add_prefix_space", "added_tokens_decoder", "auto_map", "backend", "fix_mistral_regex", "from_slow", "is_local",
    "legacy", "local_files_only", "name_or_path", "sp_model_kwargs", "tokenizer_file", "tokenizer_type", "vocab_file",
}  # fmt: skip
"""Settings of an imported tokenizer that would build another one than the corpus's."""

logger = logging.getLogger(__name__)


class InconvertibleVocabularyError(Exception):
    """The tokenizers library cannot give a vocabulary's ids. The message is the reason, a whole sentence."""


def write_tokenizer(
    folder: Path, corpus: Artifact[CorpusManifest], vocabulary_file: Path, imported: Mapping[str, Any]
) -> None:
    """Write the files by which AutoTokenizer gives the corpus's ids, and the vocabulary's file. `imported` is the
    `tokenizer_config.json` of an imported model. The folder has its `config.json`, which can change what AutoTokenizer
    loads.

    Validation documents and fuzz are encoded by the tokenizer and by the vocabulary's library. If one of them gets
    other ids, no tokenizer is written but `NO_TOKENIZER.txt`, with the reason.
    """
    payload, name = corpus.manifest.corpus, vocabulary_file.name
    vocabulary, codec = payload.vocabulary, load_codec(vocabulary_file, payload.vocabulary)
    given = {name: vocabulary_file.read_bytes()}
    if vocabulary.kind == "hugging_face":
        given = {path.name: path.read_bytes() for path in vocabulary_file.parent.iterdir()}
    files = {each: content for each, content in given.items() if each != CONFIG}
    try:
        if vocabulary.kind == "hugging_face":
            _write_files(folder, files)
            encode, before = _load_exported(folder, vocabulary_file, vocabulary), []
        else:
            tokenizer = make_tokenizer(files[name], vocabulary)
            encode, before = (lambda text: tokenizer.encode(text).ids), [vocabulary.bos_id]
        texts = [text.decode() for text in fuzz_of_vocabulary(vocabulary_file, vocabulary, FUZZ_TEXTS)]
        texts += _sample_texts(corpus, codec)
        if different := _find_difference(encode, lambda text: [*before, *codec.encode(text)], texts):
            library = "as by the vocabulary's library"
            raise InconvertibleVocabularyError(f"tokenizers {tokenizers.__version__} {different} {library}.")
    except InconvertibleVocabularyError as error:
        logger.warning("no tokenizer is exported: %s", error)
        for each in files:
            (folder / each).unlink(missing_ok=True)
        (folder / VOCABULARY_FOLDER).mkdir()
        _write_files(folder / VOCABULARY_FOLDER, given)
        after = "" if vocabulary.bos_id is None else f", after the id {vocabulary.bos_id} (BOS)"
        (folder / NO_TOKENIZER).write_text(
            f"The ids of a tokenizer for transformers would not be those that the model was trained on. {error}\n\n"
            f"Encode texts with the library of {VOCABULARY_FOLDER}/{name}{after}.\n",
            encoding="utf-8",
        )
        return
    if vocabulary.kind != "hugging_face":
        config = _tokenizer_config(tokenizer, vocabulary, payload.sequence_length, imported)
        made = {TOKENIZER: tokenizer.to_str(pretty=True), TOKENIZER_CONFIG: json.dumps(config, indent=2)}
        _write_files(folder, files | {each: text.encode() for each, text in made.items()})
    logger.info("the tokenizer gives the ids of %s for %s texts", payload.reference, f"{len(texts):,}")


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _load_exported(folder: Path, vocabulary_file: Path, vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Load the tokenizer of a folder, of which the model's configuration can make another than the corpus's."""
    try:
        codec = load_codec(folder / vocabulary_file.name, vocabulary)
        found, expected = (find_bos_and_eos(load_folder(each)) for each in (folder, vocabulary_file.parent))
    except ArtifactError as error:
        raise InconvertibleVocabularyError(f"Beside the model's {CONFIG}: {error}") from error
    if found != expected:
        raise InconvertibleVocabularyError(
            f"Beside the model's {CONFIG} it puts {found} around a text, not {expected}."
        )
    return codec.encode


def make_tokenizer(content: bytes, vocabulary: Vocabulary) -> Tokenizer:
    """Make the tokenizer of a vocabulary's file, which puts BOS before a text, and no EOS after it.

    Raises `InconvertibleVocabularyError` for a vocabulary whose rules the tokenizers library does not have.
    """
    match vocabulary.kind:
        case "sentencepiece":
            tokenizer = _from_sentencepiece(content)
        case "tokenizer_json":
            tokenizer = load_tokenizer(content)
        case "tiktoken":
            tokenizer = _from_tiktoken(content)
        case "hugging_face":
            raise ValueError("the files of a tokenizer of Hugging Face are exported as they are")
    bos = tokenizer.id_to_token(cast("int", vocabulary.bos_id))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{bos}:0", "$A:0"],
        pair=[f"{bos}:0", "$A:0", f"{bos}:1", "$B:1"],
        special_tokens=[(bos, vocabulary.bos_id)],
    )
    tokenizer.encode_special_tokens = True  # not stored in the file: `split_special_tokens` says it again
    return tokenizer


def _tokenizer_config(
    tokenizer: Tokenizer, vocabulary: Vocabulary, sequence_length: int, imported: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `tokenizer_config.json`, by which AutoTokenizer loads the tokenizer and leaves it unchanged.

    The name of a special token in a text is encoded as text, as in the corpus (`split_special_tokens`), unless the
    imported settings say otherwise.
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
        # Tokens that the tokenizer has not, such as a `<pad>` in a row of the model's padding.
        added = imported.get("added_tokens_decoder") or {}
        added = {number: each for number, each in added.items() if tokenizer.token_to_id(each["content"]) is None}
        own |= {"added_tokens_decoder": added} if added else {}
    else:
        own["split_special_tokens"] = True
    return own | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(cast("int", vocabulary.bos_id)),
        "add_bos_token": True,
        "add_eos_token": False,
    }


def require_same_vocabulary(folder: Path, corpus: Artifact[CorpusManifest], vocabulary_file: Path) -> None:
    """Raise `RecipeError` where the tokenizer of a model's folder gives other ids than the corpus's.

    The texts are those of the corpus's ids, one by one and in its documents. A tokenizer in the corpus's own form
    decides; without one, any other form that gives the ids is enough, as their edges differ.
    """
    ours, places = corpus.manifest.corpus.vocabulary, (folder, folder / VOCABULARY_FOLDER)
    own = {place / vocabulary_file.name: ours.kind for place in places}
    others = {place / name: kind for place in places for name, kind in _FORMS.items()}
    forms = [{path: kind for path, kind in each.items() if path.exists()} for each in (own, others)]
    if not any(forms):
        logger.warning("%s: has no tokenizer to compare: its weights must know the ids of %s", folder, corpus.path)
        return
    codec = load_codec(vocabulary_file, ours)
    texts = [*(codec.decode([number]) for number in range(ours.vocab_size)), *_sample_texts(corpus, codec)]
    problems = []
    for path, kind in (forms[0] or forms[1]).items():
        try:
            theirs = load_codec(path, ours.model_copy(update={"kind": kind}))
            difference = _find_difference(theirs.encode, codec.encode, texts)
        except ArtifactError as error:
            difference = str(error).rstrip(".")
        if not difference:
            return
        place = path.parent if kind == "hugging_face" else path
        problems.append(
            f"{place}: {difference}. The weights read the ids of this tokenizer, and the corpus has those of another. "
            f'Tokenize with `[tokenizer] model = "{place}"`.'
        )
    raise RecipeError(problems[0])


def _sample_texts(corpus: Artifact[CorpusManifest], codec: Codec) -> list[str]:
    """Decode documents of the validation split, or of the training split where that has none."""
    payload = corpus.manifest.corpus
    split: Split = "validation" if payload.splits["validation"].documents else "train"
    first = payload.vocabulary.num_special_tokens - 1
    return [codec.decode(ids[first:-1].tolist()) for ids in sample_documents(corpus, split, CHECKED_TOKENS)]


def _find_difference(
    encode: Callable[[str], list[int]], expected: Callable[[str], list[Any]], texts: Iterable[str]
) -> str:
    """Return what is encoded with other ids than expected; empty where nothing is."""
    for text in texts:
        found, wanted = encode(text), expected(text)
        if found != wanted:
            at = next(at for at, (a, b) in enumerate(zip_longest(found, wanted)) if a != b)
            return (
                f"encodes {text[:_SHOWN_CHARACTERS]!r} from position {at:,} on as {found[at : at + 8]}, expected "
                f"{wanted[at : at + 8]}"
            )
    return ""


def _from_sentencepiece(content: bytes) -> Tokenizer:
    settings, processor = read_settings(content), load_model(content)
    kinds = settings.piece_kinds
    pieces = [str(processor.id_to_piece(index)) for index in range(len(kinds))]
    special = [pieces[index] for index, kind in enumerate(kinds) if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)]
    normal = {pieces[index]: index for index, kind in enumerate(kinds) if kind == PieceKind.NORMAL}
    _require_convertible(settings, normal)
    scores = {index: float(processor.get_score(index)) for index in normal.values()}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=_list_merges(normal, scores),
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=PieceKind.BYTE in kinds,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(list(_normalize(settings)))
    undo_prefix = [decoders.Strip(" ", 1, 0)] if settings.adds_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_PIECE, " "), decoders.ByteFallback(), decoders.Fuse(), *undo_prefix]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return tokenizer


def _require_convertible(settings: SentencePieceSettings, normal: Mapping[str, int]) -> None:
    rules = {
        "is no BPE model": not settings.is_bpe,
        "writes spaces at the end of words": settings.puts_whitespace_last,
        "has user-defined pieces": PieceKind.USER_DEFINED in settings.piece_kinds,
        "has unused pieces": PieceKind.UNUSED in settings.piece_kinds,
        "has pieces with characters that are no pieces": not {*"".join(normal)} <= normal.keys(),
        # normalizers.Precompiled applies the table to grapheme clusters, and gives other text for some of them.
        "has a normaliser that replaces characters": settings.changes_characters,
    }
    if found := [rule for rule, holds in rules.items() if holds]:
        lacks = "for which the tokenizers library has no equal rule"
        raise InconvertibleVocabularyError(f"The SentencePiece model {', '.join(found)}, {lacks}.")


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
    from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: PLC0415 - takes seconds

    converter: Any = TikTokenConverter(  # type: ignore[no-untyped-call]
        pattern=LLAMA3_PATTERN, extra_special_tokens=LLAMA3_SPECIAL_TOKENS
    )
    converter.load_tiktoken_bpe = lambda _: read_ranks(content)  # tiktoken's own reader caches files by their paths
    tokenizer: Tokenizer = converter.converted()
    return tokenizer


def sample_documents(
    corpus: Artifact[CorpusManifest], split: Split, max_tokens: int
) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield the ids of every n-th document of a split, BOS and EOS included; they have about `max_tokens` or fewer."""
    payload = corpus.manifest.corpus
    stride, number = max(1, -(-payload.splits[split].tokens // max_tokens)), -1
    parts: list[npt.NDArray[np.integer[Any]]] = []
    for file in map_files(corpus.path, payload, split):
        rows = np.arange(len(file.start_offsets) - 1)
        starts = np.repeat(rows * payload.sequence_length, np.diff(file.start_offsets)) + file.starts
        before, *documents = np.split(file.tokens, starts)
        if parts:
            parts.append(before)
        for document in documents:
            if parts:
                yield np.concatenate(parts)
            number += 1
            parts = [document] if number % stride == 0 else []
    if parts:
        yield np.concatenate(parts)
