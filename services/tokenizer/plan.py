"""The plan of a corpus: its inputs, the splits that encode tasks read, and the id of what will come out."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import xxhash

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.manifest import InputLink, write_durably
from services.common.artifacts.store import Workspace, artifact_id, discard
from services.common.recipe import Recipe, fingerprint
from services.tokenizer.atomic_file import TEMPORARY_SUFFIX
from services.tokenizer.encoding.encoder_choice import EncoderChoice
from services.tokenizer.sources.documents import cut_file, list_inputs
from services.tokenizer.sources.file_range import FileRange, InputFile, InputPartition
from services.tokenizer.sources.file_system import read_vocabulary

CONTENT_VERSION = 1
"""Raised when the same recipe and inputs give other bytes."""

PLAN = "plan.json"
VOCABULARY = "vocabulary"
"""The vocabulary's name in scratch; in the corpus it has the name that programs expect."""


@dataclass(frozen=True)
class Plan:
    artifact_id: str
    partitions: tuple[InputPartition, ...]
    links: tuple[InputLink, ...]
    """Provenance: a line per source, and at the end one for a given vocabulary."""

    @property
    def input_files(self) -> int:
        return len({file_range.file.uri for partition in self.partitions for file_range in partition.file_ranges})


def make_plan(recipe: Recipe) -> Plan:
    """List and digest the inputs and cut them into partitions of about `corpus.split_bytes`.

    Sources with a weight above 1 are read again after all sources were read once, so that a training sequence does not
    hold a document twice.
    """
    listed = [(source, list_inputs(source, recipe.corpus.max_document_bytes)) for source in recipe.corpus.sources]
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
    order = [
        (number, pass_number, group)
        for pass_number in range(max(passes))
        for number, source_groups in enumerate(groups)
        if pass_number < passes[number]
        for group in source_groups
    ]
    return Plan(
        artifact_id=artifact_id(recipe, "corpus", CONTENT_VERSION, [link.content_digest for link in links]),
        partitions=tuple(
            InputPartition(index, source=number, pass_number=pass_number, file_ranges=group)
            for index, (number, pass_number, group) in enumerate(order)
        ),
        links=tuple(links),
    )


def begin_encoding(workspace: Workspace, plan: Plan, vocabulary: Vocabulary, encoder: EncoderChoice) -> Path:
    """The folder for the partitions of this plan, encoded so: whoever writes a file of it writes the same bytes.

    What belongs to another plan, vocabulary or encoder is discarded, and what killed writers left. It is listed before
    the lease is checked: names that a newer holder has thought of since are not among it.
    """
    partitions = [dataclasses.asdict(partition) for partition in plan.partitions]
    folder = workspace.scratch / fingerprint([partitions, vocabulary.sha256, encoder])[:16]
    kept = {folder, workspace.scratch / VOCABULARY}
    stale = [path for path in workspace.scratch.iterdir() if path not in kept]
    for path in [*stale, *folder.glob(f"*{TEMPORARY_SUFFIX}")]:
        discard(path, workspace.lease)
    folder.mkdir(exist_ok=True)
    if not (folder / PLAN).exists():
        write_durably(folder / PLAN, json.dumps(partitions, indent=1).encode())
    return folder


def _group(file_ranges: list[FileRange], split_bytes: int) -> list[tuple[FileRange, ...]]:
    """Consecutive file ranges, together no larger than `split_bytes` unless one alone is."""
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
    """Ranges of a file that follow each other as one, for which the file is opened once."""
    joined: list[FileRange] = []
    for file_range in file_ranges:
        if joined and (joined[-1].file, joined[-1].end) == (file_range.file, file_range.begin):
            first = joined.pop()
            joined.append(FileRange(file_range.file, first.begin, file_range.end, first.bytes + file_range.bytes))
        else:
            joined.append(file_range)
    return tuple(joined)


def _link(schema: str, uri: str, files: list[InputFile]) -> InputLink:
    # A name decides the format, and in documentation the text too; so a renamed file is another input.
    digest = fingerprint([[file.name, file.format, file.digest] for file in files])
    return InputLink(schema_id=schema, path=uri, id=digest[:16], content_digest=digest)


def _link_vocabulary(uri: str) -> InputLink:
    digest = xxhash.xxh3_128_hexdigest(read_vocabulary(uri))
    return InputLink(schema_id="vocabulary/1", path=uri, id=digest[:16], content_digest=digest)
