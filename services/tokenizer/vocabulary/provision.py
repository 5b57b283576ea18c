"""Provides the corpus's vocabulary: the one that the recipe names, or a SentencePiece model trained on the text."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from services.common.artifacts.corpus import Vocabulary, VocabularyKind
from services.common.artifacts.manifest import ManifestModel, write_durably
from services.common.artifacts.store import discard
from services.common.artifacts.upstream import advise_vocab_size
from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Corpus, Recipe, Tokenizer, VocabularyTraining
from services.common.vocabularies.codec import load_json
from services.common.vocabularies.fuzz import fuzz_documents
from services.common.vocabularies.hugging_face import (
    encode_texts,
    find_bos_and_eos,
    load_folder,
    main_file,
    read_backend,
)
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.corpus_inputs import CorpusInputs
from services.tokenizer.encoding.encoder import FUZZ_DOCUMENTS
from services.tokenizer.scratch import VOCABULARY, VOCABULARY_MARKER
from services.tokenizer.sources.input_files import FileListing
from services.tokenizer.tasks import read_marker, write_marker
from services.tokenizer.vocabulary.files import read_vocabulary
from services.tokenizer.vocabulary.text_sample import sample_text
from services.tokenizer.vocabulary.training import train_vocabulary

logger = logging.getLogger(__name__)

_FOLDER = "tokenizer"
"""Folder of the vocabulary in a corpus."""
_NAMES: dict[VocabularyKind, str] = {
    "sentencepiece": "tokenizer.model",
    "tokenizer_json": "tokenizer.json",
    "tiktoken": "tokenizer.tiktoken",
}
# BOS and EOS of Llama 3 and of Llama 2, for a tokenizer.json: the file does not name them.
_KNOWN_BOS_AND_EOS: tuple[tuple[str, str], ...] = (("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"))


class _VocabularyMarker(ManifestModel):
    """The checksums of the vocabulary's files in scratch, by their names."""

    files: dict[str, str]


def provide_vocabulary(recipe: Recipe, inputs: CorpusInputs, scratch: Path) -> tuple[Path, Vocabulary]:
    """Return the path of the vocabulary in `scratch`, and its description. A trained one that is there is used.

    Raises `ArtifactError` for files that are no vocabulary, and `RecipeError` where its size is not `model.vocab_size`.
    """
    folder, marker_path = scratch / VOCABULARY, scratch / VOCABULARY_MARKER
    uri, content = recipe.tokenizer.model, inputs.vocabulary.content if inputs.vocabulary else b""
    marker = read_marker(
        marker_path, _VocabularyMarker, lambda marker: {folder / name: each for name, each in marker.files.items()}
    )
    if recipe.tokenizer.train:
        if marker:
            content = (folder / _NAMES["sentencepiece"]).read_bytes()
        else:
            content, _ = train_on_sample(recipe.corpus, inputs.listings, recipe.tokenizer.train)
    try:
        if isinstance(content, dict):
            vocabulary, files = _describe_files(content, recipe.tokenizer), content
        else:
            vocabulary = describe_vocabulary(content, recipe.tokenizer)
            files = {_NAMES[vocabulary.kind]: content}
            if uri and vocabulary.kind == "tokenizer_json":
                _require_ids_of_folder(uri, content)
    except ArtifactError as error:
        raise ArtifactError(f"{uri}: {error}") from error
    if vocabulary.vocab_size != recipe.model.vocab_size:
        raise RecipeError(
            f"{uri} has {vocabulary.vocab_size:,} pieces, but model.vocab_size is {recipe.model.vocab_size:,}. "
            f"{advise_vocab_size(recipe, vocabulary.vocab_size)}, or name another tokenizer.model."
        )
    if not marker:
        discard(folder)
        folder.mkdir()
        for name, each in files.items():
            write_durably(folder / name, each)
        digests = {name: xxhash.xxh3_128_hexdigest(each) for name, each in files.items()}
        write_marker(marker_path, _VocabularyMarker(files=digests))
    return folder / Path(vocabulary.path).name, vocabulary


def train_on_sample(
    corpus: Corpus, listings: tuple[FileListing, ...], training: VocabularyTraining
) -> tuple[bytes, list[bytes]]:
    """Train a vocabulary on a sample of the training split. Return the model and the sample."""
    documents = sample_text(corpus, listings, training.max_bytes)
    text_bytes = sum(map(len, documents))
    if not text_bytes:
        uris = ", ".join(source.uri for source in corpus.sources)
        raise ArtifactError(f"{uris}: the sources hold no text to train a tokenizer on. Add text.")
    logger.info("training a tokenizer of %s pieces on %s bytes of text", f"{training.vocab_size:,}", f"{text_bytes:,}")
    return train_vocabulary(documents, training.vocab_size), documents


def describe_vocabulary(content: bytes, settings: Tokenizer) -> Vocabulary:
    """Describe the vocabulary in a file. The file's content decides its kind.

    Raises `ArtifactError` when the content is no vocabulary, or has no BOS or no EOS.
    """
    kind: VocabularyKind
    if content.lstrip()[:1] == b"{":
        kind, (vocab_size, bos_id, eos_id) = "tokenizer_json", _describe_json(content, settings)
    elif _looks_like_tiktoken(content):
        kind, (vocab_size, bos_id, eos_id) = "tiktoken", _describe_tiktoken(content)
    else:
        kind, (vocab_size, bos_id, eos_id) = "sentencepiece", _describe_sentencepiece(content)
    return Vocabulary(
        kind=kind,
        path=f"{_FOLDER}/{_NAMES[kind]}",
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
    )


def _describe_files(files: dict[str, bytes], settings: Tokenizer) -> Vocabulary:
    """Describe the tokenizer of a folder's files, whose tokens around a text are those that the tokenizer puts there.

    Raises `ArtifactError` where transformers cannot load it, or it has no token that ends a document.
    """
    tokenizer = _load_files(files)
    if backend := read_backend(tokenizer):
        load_json(backend)  # raises for added tokens on which the library fails
    ids: dict[str, int] = tokenizer.get_vocab()
    texts = [text.decode() for text in fuzz_documents(sorted(ids), FUZZ_DOCUMENTS)]
    if encode_texts(tokenizer, texts) != encode_texts(tokenizer, texts):
        raise ArtifactError("the tokenizer gives a text other ids each time. Set its `enable_sampling` to false.")
    if found := _find_other_class(files.get("tokenizer.json", b""), tokenizer):
        logger.warning("the ids are those of AutoTokenizer by its class %s: tokenizer.json gives other ids", found)
    for token in filter(None, (settings.bos_token, settings.eos_token)):
        if token not in ids:
            raise ArtifactError(f"the tokenizer has no token {token!r}, which tokenizer.bos_token or eos_token names.")
    bos_id, eos_id = find_bos_and_eos(tokenizer)
    bos_id = ids[settings.bos_token] if settings.bos_token else bos_id
    eos_id = ids[settings.eos_token] if settings.eos_token else eos_id
    if eos_id is None:
        raise ArtifactError(
            "the tokenizer has no EOS, and a corpus stores one behind every document. Set tokenizer.eos_token to one "
            f"of its special tokens: {', '.join(tokenizer.all_special_tokens[:20]) or 'it has none'}."
        )
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return Vocabulary(
        kind="hugging_face",
        path=f"{_FOLDER}/{main_file(list(files))}",
        sha256=digest.hexdigest(),
        vocab_size=max(ids.values()) + 1,
        bos_id=bos_id,
        eos_id=eos_id,
    )


def _load_files(files: dict[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return load_folder(Path(folder))


def _find_other_class(content: bytes, tokenizer: Any) -> str:
    """Return the class by which AutoTokenizer gives other ids than a tokenizer.json; empty where it gives the same."""
    texts = fuzz_documents(sorted(tokenizer.get_vocab()), FUZZ_DOCUMENTS)
    with suppress(ArtifactError):  # one of them gives none
        ids = [each.tolist() for each in load_json(content).encode_documents(texts)]
        if ids != encode_texts(tokenizer, [text.decode() for text in texts]):
            return type(tokenizer).__name__
    return ""


def _require_ids_of_folder(uri: str, content: bytes) -> None:
    """Raise `ArtifactError` for a tokenizer.json in a folder for which AutoTokenizer gives other ids."""
    folder, _, name = uri.rpartition("/")
    if name != "tokenizer.json" or uri.startswith("http"):
        return
    files, found = read_vocabulary(folder or ".").content, ""
    with suppress(ArtifactError):  # a class that cannot be loaded gives no ids
        found = _find_other_class(content, _load_files(files)) if isinstance(files, dict) and len(files) > 1 else ""
    if found:
        raise ArtifactError(f"AutoTokenizer's {found} gives other ids. Name the folder, or a copy of the file alone.")


def _describe_sentencepiece(content: bytes) -> tuple[int, int, int]:
    try:
        processor = load_model(content)
    except ArtifactError as error:
        raise ArtifactError(
            "the file is no SentencePiece model, no tokenizer.json and no tiktoken file. "
            "Set tokenizer.model to one of the three, or to the folder of a tokenizer of another kind."
        ) from error
    if min(processor.bos_id(), processor.eos_id()) < 0:
        raise ArtifactError(
            "the SentencePiece model has no BOS or no EOS, and a corpus stores every document between the two."
        )
    if not any(processor.is_byte(piece) for piece in range(processor.vocab_size())):
        logger.warning("the vocabulary has no byte pieces: a character without a piece becomes <unk>, and is lost")
    return processor.vocab_size(), processor.bos_id(), processor.eos_id()


def _describe_json(content: bytes, settings: Tokenizer) -> tuple[int, int, int]:
    try:
        fields = json.loads(content)
        vocab, added = fields["model"]["vocab"], fields.get("added_tokens") or []
        ids: dict[str, int] = {token["content"]: token["id"] for token in added if token.get("special", True)}
        in_text = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max([*in_text, *(token["id"] for token in added), -1])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"the file is JSON, but no tokenizer.json of Hugging Face ({error!r}).") from error
    pairs = _KNOWN_BOS_AND_EOS
    if settings.bos_token and settings.eos_token:
        pairs = ((settings.bos_token, settings.eos_token),)
    bos, eos = next((pair for pair in pairs if ids.keys() >= set(pair)), ("", ""))
    if not bos:
        raise ArtifactError(
            f"the file does not say which special tokens are BOS and EOS, and a corpus stores every document between "
            f"the two. Set tokenizer.bos_token and tokenizer.eos_token to two of the file's special tokens: "
            f"{', '.join(list(ids)[:20]) or 'it has none'}."
        )
    encode = load_json(content).encode
    for token in (bos, eos):
        if ids[token] in encode(token):
            logger.warning("the model has %s as a piece of text: in a document it becomes that token", token)
    return largest + 1, ids[bos], ids[eos]


def _looks_like_tiktoken(content: bytes) -> bool:
    fields = content[: content.find(b"\n")].split()
    return len(fields) == 2 and fields[1].isdigit()


def _describe_tiktoken(content: bytes) -> tuple[int, int, int]:
    from services.common.vocabularies.tiktoken_file import LLAMA3_SPECIAL_TOKENS, read_ranks  # noqa: PLC0415

    num_ranks = len(read_ranks(content))
    return num_ranks + len(LLAMA3_SPECIAL_TOKENS), num_ranks, num_ranks + 1
