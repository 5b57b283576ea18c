"""compile_cache/1: every compiled graph of one program on one kind of machine.

The folder is what the compiler's own cache directory held when it had nothing left to do. A trainer
works on a node-local copy, because caches write into the directory that they read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.common.artifacts.manifest import Count, Manifest, ManifestModel, Many, Phase, Sha256
from services.common.artifacts.store import Address
from services.common.recipe.schema import Device, Recipe, fingerprint

GRAPHS = "graphs"
"""Subfolder that holds the compiler's cache directory."""


class CompileCachePayload(ManifestModel):
    target: Device
    """Of `parallel.device`."""
    program_fingerprint: Sha256
    facts: dict[str, Any]
    """What the fingerprint is the hash of; two caches are compared fact by fact."""
    graphs_compiled: Annotated[int, Field(ge=1)]
    graphs_missed_by_verification: Literal[0]
    """Graphs that a second process had to compile although it was given this cache."""
    world_size_traced: Count
    phases: Many[Phase]

    @model_validator(mode="after")
    def _is_of_its_facts(self) -> Self:
        found = fingerprint(self.facts)
        if found != self.program_fingerprint:
            raise ValueError(f"its facts hash to {found[:12]}, program_fingerprint is {self.program_fingerprint[:12]}")
        return self


def compile_cache_address(root: Path, recipe: Recipe, program_fingerprint: str) -> Address:
    """Where the cache of this recipe's program belongs: the compiler publishes it there, the trainer looks there."""
    return Address(root, "compile_cache", recipe.name, program_fingerprint[:16])


class CompileCacheManifest(Manifest):
    SCHEMA: ClassVar[str] = "compile_cache/1"

    compile_cache: CompileCachePayload
