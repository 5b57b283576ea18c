"""The scratch folder of a corpus: what an interrupted command leaves for the next one."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.lock import LockTaken, hold_lock
from services.common.artifacts.manifest import write_durably
from services.common.artifacts.store import (
    LOCK_SUFFIX,
    SCRATCH_SUFFIX,
    Address,
    Workspace,
    discard,
    discard_unfinished,
    is_id,
)
from services.common.recipe.schema import Recipe, fingerprint, identity
from services.tokenizer.corpus_inputs import CorpusInputs
from services.tokenizer.tasks import TEMPORARY_SUFFIX

VOCABULARY, VOCABULARY_MARKER = "vocabulary", "vocabulary.json"
_OWNER = "owner"
"""Name of the file in scratch that tells which recipe's corpus is made there: see `_owner_of`."""
_POLICIES = ("corpus.bad_rows", "corpus.max_document_bytes")


def plan_folder_of(workspace: Workspace, recipe: Recipe, inputs: CorpusInputs) -> Path:
    """Return the folder of the plan. Its name follows from all that the plan is made from."""
    uris = [source.uri for source in recipe.corpus.sources]
    listed = [[uri, listing.digest] for uri, listing in zip(uris, inputs.listings, strict=True)]
    key = fingerprint([listed, recipe.corpus.split_bytes, recipe.corpus.max_document_bytes])
    return workspace.scratch / f"plan-{key[:16]}"


def open_partition_folder(workspace: Workspace, plan: Path, vocabulary: Vocabulary, encoder: str) -> Path:
    """Return the folder for the encoded partitions, whose name follows from plan, vocabulary and encoder.

    Everything else in scratch is discarded, and so are temporary files of killed writers.
    """
    folder = workspace.scratch / fingerprint([plan.name, vocabulary.sha256, encoder])[:16]
    kept = {folder, plan, *(workspace.scratch / name for name in (VOCABULARY, VOCABULARY_MARKER, _OWNER))}
    stale = [path for path in workspace.scratch.iterdir() if path not in kept]
    for path in [*stale, *folder.glob(f"*/*{TEMPORARY_SUFFIX}")]:
        discard(path)
    folder.mkdir(exist_ok=True)
    return folder


def find_partition_folders(workspace: Workspace) -> tuple[Path, ...]:
    """Return the folders of encoded partitions of other corpora of this name.

    Most often they are of a command that stopped at a file which was mended since.
    """
    found: list[Path] = []
    for scratch in sorted(workspace.scratch.parent.glob(f"*{SCRATCH_SUFFIX}")):
        with suppress(FileNotFoundError):  # another command has published, and removes it
            if scratch != workspace.scratch:
                found += [path for path in scratch.iterdir() if is_id(path.name)]
    return tuple(found)


def record_owner(workspace: Workspace, recipe: Recipe) -> None:
    """Record for `discard_outdated` whose scratch this is."""
    write_durably(workspace.scratch / _OWNER, _owner_of(recipe).encode())


def _owner_of(recipe: Recipe) -> str:
    """Return the hash of the recipe's fields that decide a corpus, but for what it does with bad rows."""
    fields = identity(recipe, "corpus")
    return fingerprint({name: value for name, value in fields.items() if name not in _POLICIES})


def discard_outdated(address: Address, recipe: Recipe) -> None:
    """Remove the scratch of earlier inputs of the recipe, whose newest inputs are published at `address`.

    What another command still writes, and what belongs to another recipe of the same corpus name, is left alone.
    """
    for scratch in sorted(address.collection.glob(f"*{SCRATCH_SUFFIX}")):
        other = scratch.name.removesuffix(SCRATCH_SUFFIX)
        with suppress(FileNotFoundError, LockTaken):
            if other == address.id or (scratch / _OWNER).read_bytes() != _owner_of(recipe).encode():
                continue
            with hold_lock(address.collection / f"{other}{LOCK_SUFFIX}", waits=False):
                discard_unfinished(address.collection, re.escape(other))
                discard(scratch)
