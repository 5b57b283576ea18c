"""The plan of a corpus: its inputs, the partitions that encode tasks read, and the corpus's id."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import xxhash

from services.common.artifacts.manifest import InputLink
from services.common.artifacts.store import artifact_id
from services.common.recipe.schema import Recipe
from services.tokenizer.sources.documents import cut_file, list_inputs
from services.tokenizer.sources.file_listing import FileListing
from services.tokenizer.sources.file_range import FileRange, InputPartition
from services.tokenizer.sources.file_system import read_vocabulary

CONTENT_VERSION = 3
"""A part of every corpus's id. A release that gives other bytes for the same recipe and inputs raises it."""


@dataclass(frozen=True)
class CorpusPlan:
    """The work of one corpus, before any text is read."""

    artifact_id: str
    files: tuple[FileListing, ...]
    """Files of each source, in the order of `corpus.sources`."""
    partitions: tuple[InputPartition, ...]
    links: tuple[InputLink, ...]
    """The inputs that the manifest names: one link for each source, then one for a vocabulary that the recipe names."""

    @property
    def num_input_files(self) -> int:
        return sum(map(len, self.files))


def plan_corpus(recipe: Recipe) -> CorpusPlan:
    """List the inputs, take their digests and cut them into partitions of about `corpus.split_bytes`.

    A source with a weight above 1 is read again only after all sources were read once. So the copies of a document are
    far apart, and no training sequence holds two of them.
    """
    listed = [(source, list_inputs(source)) for source in recipe.corpus.sources]
    links = [_link("text/1", source.uri, files) for source, files in listed]
    if recipe.tokenizer.model:
        links.append(_link_vocabulary(recipe.tokenizer.model))
    split_bytes, max_document_bytes = recipe.corpus.split_bytes, recipe.corpus.max_document_bytes
    groups = [
        _group(
            [file_range for file in files for file_range in cut_file(file, split_bytes, max_document_bytes)],
            split_bytes,
        )
        for _, files in listed
    ]
    passes = [math.ceil(source.weight) for source, _ in listed]
    begins = list(accumulate(map(len, groups), initial=0))
    order = [
        (number, pass_number, first_pass_index, group)
        for pass_number in range(max(passes))
        for number, source_groups in enumerate(groups)
        if pass_number < passes[number]
        for first_pass_index, group in enumerate(source_groups, begins[number])
    ]
    return CorpusPlan(
        artifact_id=artifact_id(recipe, "corpus", CONTENT_VERSION, [link.content_digest for link in links]),
        files=tuple(files for _, files in listed),
        partitions=tuple(
            InputPartition(index, number, pass_number, first_pass_index, file_ranges=group)
            for index, (number, pass_number, first_pass_index, group) in enumerate(order)
        ),
        links=tuple(links),
    )


def _group(file_ranges: list[FileRange], split_bytes: int) -> list[tuple[FileRange, ...]]:
    """Group consecutive file ranges into groups of at most `split_bytes`. A larger file range is alone in its group."""
    groups: list[list[FileRange]] = []
    room = 0
    for file_range in file_ranges:
        if not groups or file_range.bytes > room:
            groups.append([])
            room = split_bytes
        groups[-1].append(file_range)
        room -= file_range.bytes
    return [_join_neighbours(group) for group in groups]


def _join_neighbours(file_ranges: list[FileRange]) -> tuple[FileRange, ...]:
    """Join adjacent ranges of the same file, so that the file is opened once for all of them."""
    joined: list[FileRange] = []
    for file_range in file_ranges:
        if joined and (joined[-1].file, joined[-1].end) == (file_range.file, file_range.begin):
            first = joined.pop()
            joined.append(FileRange(file_range.file, first.begin, file_range.end, first.bytes + file_range.bytes))
        else:
            joined.append(file_range)
    return tuple(joined)


def _link(schema: str, uri: str, files: FileListing) -> InputLink:
    digest = files.digest
    return InputLink(schema_id=schema, path=uri, id=digest[:16], content_digest=digest)


def _link_vocabulary(uri: str) -> InputLink:
    digest = xxhash.xxh3_128_hexdigest(read_vocabulary(uri))
    return InputLink(schema_id="vocabulary/1", path=uri, id=digest[:16], content_digest=digest)
