"""The inputs of a corpus, and the corpus's id, which follows from them before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.artifacts.manifest import InputLink
from services.common.artifacts.store import artifact_id
from services.common.recipe.schema import Recipe
from services.common.source_code import digest_source
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.sources.input_files import FileListing
from services.tokenizer.vocabulary.files import VocabularyFiles, read_vocabulary

CONTENT_VERSION = 5
"""A part of every corpus's id. A release that gives other bytes for the same recipe and inputs raises it."""
_PACKAGES = ("services.tokenizer.", "services.common.vocabularies.", "services.common.artifacts.corpus_rows")


@dataclass(frozen=True)
class CorpusInputs:
    """The files of a corpus's sources, and the vocabulary that the recipe names."""

    artifact_id: str
    listings: tuple[FileListing, ...]
    """Files of each source, in the order of `corpus.sources`."""
    vocabulary: VocabularyFiles | None
    """The vocabulary that the recipe names; None where a vocabulary is trained."""

    def link(self, recipe: Recipe, text_digests: list[str]) -> tuple[InputLink, ...]:
        """Return the inputs that the manifest names: one link for each source, then one for a given vocabulary.

        `text_digests` are hashes of the documents of each source, as the encode tasks have read them.
        """
        links = [
            InputLink(schema_id="text/1", path=source.uri, id=listing.digest[:16], content_digest=text_digest)
            for source, listing, text_digest in zip(recipe.corpus.sources, self.listings, text_digests, strict=True)
        ]
        if self.vocabulary is not None:
            path, digest = str(recipe.tokenizer.model), self.vocabulary.digest
            links.append(InputLink(schema_id="vocabulary/1", path=path, id=digest[:16], content_digest=digest))
        return tuple(links)


def list_corpus_inputs(recipe: Recipe) -> CorpusInputs:
    """List the files of all sources. A named vocabulary, which is small, is all that is read."""
    listings = tuple(list_inputs(source) for source in recipe.corpus.sources)
    vocabulary = read_vocabulary(recipe.tokenizer.model) if recipe.tokenizer.model else None
    digests = [listing.digest for listing in listings]
    if vocabulary is not None:
        digests.append(vocabulary.digest)
    return CorpusInputs(artifact_id(recipe, "corpus", CONTENT_VERSION, digests), listings, vocabulary)


def digest_code() -> str:
    """Return the digest of the code that decides a corpus's bytes. A module that moves does not change it."""
    return digest_source("services.tokenizer.build", packages=_PACKAGES, with_imports=False)
