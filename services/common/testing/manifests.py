"""Writes manifests as other programs might: with other fields, and with a valid seal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.common.artifacts.files import describe_files
from services.common.artifacts.manifest import MANIFEST, read_sealed
from services.common.recipe.schema import fingerprint

Fields = dict[str, Any]


def write_sealed(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write a sealed manifest with any fields."""
    (folder / MANIFEST).write_text(json.dumps({**fields, "seal": fingerprint(dict(fields))}), encoding="utf-8")


def reseal(folder: Path, change: Callable[[Fields], object]) -> None:
    """Write an artifact's manifest again after `change` has changed its fields."""
    fields = read_sealed(folder)
    change(fields)
    write_sealed(folder, fields)


def forge(folder: Path, change: Callable[[Fields], object] = lambda fields: None) -> None:
    """Do the same as `reseal`, with entries that fit the files as they are now."""

    def describe_then_change(fields: Fields) -> None:
        fields["files"] = [entry.to_json() for entry in describe_files(folder)]
        change(fields)

    reseal(folder, describe_then_change)


def in_all_of_state(**changes: Any) -> Callable[[Fields], None]:
    """Return a function for `reseal` that changes a checkpoint's payload and the origins of its shards alike."""

    def change(fields: Fields) -> None:
        state = fields["checkpoint"]
        shards = state.pop("shards")
        state.update(changes)
        digest = fingerprint(state)
        for shard in shards.values():
            shard.update({name: value for name, value in changes.items() if name in shard}, payload_digest=digest)
        state["shards"] = shards

    return change
