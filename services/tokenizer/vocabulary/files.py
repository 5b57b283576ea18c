"""Reads the vocabulary that a recipe names: one file, or the tokenizer's files of a folder or a repository."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath

import xxhash

from services.common.errors import ArtifactError
from services.common.vocabularies.hugging_face import is_tokenizer_file
from services.tokenizer.sources.file_system import as_artifact_error, find_file_system, read_file


@dataclass(frozen=True)
class VocabularyFiles:
    """The content of a vocabulary's files."""

    content: bytes | dict[str, bytes]
    """Content of the file that the recipe names, or of the files of a tokenizer's folder by their names."""

    @property
    def digest(self) -> str:
        if isinstance(self.content, bytes):
            return xxhash.xxh3_128_hexdigest(self.content)
        digests = {name: xxhash.xxh3_128_hexdigest(each) for name, each in self.content.items()}
        return xxhash.xxh3_128_hexdigest(json.dumps(digests, sort_keys=True).encode())


def read_vocabulary(uri: str) -> VocabularyFiles:
    """Read a vocabulary's file, or the tokenizer's files of a folder. Raises `ArtifactError` for a folder without."""
    if uri.startswith(("http://", "https://")):  # have no folders
        return VocabularyFiles(read_file(uri))
    file_system, path = find_file_system(uri)
    with as_artifact_error(uri):
        if not file_system.isdir(path):
            return VocabularyFiles(read_file(uri))
        found = [each["name"] for each in file_system.ls(path, detail=True) if each["type"] != "directory"]
        names = sorted(filter(is_tokenizer_file, (PurePosixPath(each).name for each in found)))
        files = {name: read_file(f"{uri.rstrip('/')}/{name}") for name in names}
    if not files:
        raise ArtifactError(f"{uri}: the folder has no files of a tokenizer, such as tokenizer.json.")
    return VocabularyFiles(files)
