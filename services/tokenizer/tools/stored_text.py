"""Token ids back to text for people to look at, with each kind of vocabulary."""

from __future__ import annotations

import unicodedata
from itertools import groupby

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import listed_file
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.vocabularies.codec import load_codec
from services.tokenizer.encoding.encoder import TokenIds

CONTEXT_TOKENS = 4
"""Enough before an excerpt to tell whether it begins with a space, or in the middle of a character."""

# They reorder what a terminal shows around them.
_DIRECTION_CONTROLS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class StoredText:
    """Decodes what a corpus stores. BOS and EOS become ⟨BOS⟩ and ⟨EOS⟩, wherever they are; `</s>` is text."""

    def __init__(self, corpus: Artifact[CorpusManifest]) -> None:
        vocabulary = corpus.manifest.corpus.vocabulary
        self._folder = corpus.path
        self._decode = load_codec(listed_file(corpus.path, corpus.manifest, vocabulary.path), vocabulary).decode
        self._marks = {vocabulary.bos_id: "⟨BOS⟩", vocabulary.eos_id: "⟨EOS⟩"}
        if vocabulary.bos_id == vocabulary.eos_id:
            self._marks[vocabulary.bos_id] = "⟨BOS/EOS⟩"
        self._vocab_size = vocabulary.vocab_size

    def show(self, tokens: TokenIds, before: TokenIds | None = None) -> str:
        """The text of `tokens`, of which `before` are the ones in front. Control characters become escapes.

        Raises `ArtifactError` for an id that is not in the vocabulary.
        """
        ids: list[int] = tokens.tolist()
        context: list[int] = [] if before is None else self._after_last_mark(before.tolist())
        shown: list[str] = []
        try:
            for is_mark, group in groupby(ids, self._marks.__contains__):
                run = list(group)
                shown.append("".join(map(self._marks.__getitem__, run)) if is_mark else self._continue(context, run))
                context = []
        except LookupError as error:
            raise ArtifactError(
                f"{self._folder}: tokens {ids} are not all in its vocabulary of {self._vocab_size:,} ({error}). "
                f"Check the corpus with `python -m services.common.artifacts verify {self._folder}`."
            ) from error
        return "".join(map(_escape_control, "".join(shown)))

    def _continue(self, context: list[int], ids: list[int]) -> str:
        """The text of `ids` in their place: decoders take the first space for the one that encoding has added."""
        text_before, text = self._decode(context), self._decode(context + ids)
        return text.removeprefix(text_before) if text.startswith(text_before) else self._decode(ids)

    def _after_last_mark(self, ids: list[int]) -> list[int]:
        marks = [index for index, token in enumerate(ids) if token in self._marks]
        return ids[marks[-1] + 1 :] if marks else ids


def _escape_control(character: str) -> str:
    if character in "\n\t":
        return character
    if character in _DIRECTION_CONTROLS or unicodedata.category(character) == "Cc":
        return character.encode("unicode_escape").decode()
    return character
