"""Defines compile_cache/1: every compiled graph of one program for one kind of machine.

The folder is the compiler's own cache directory, once it had nothing left to compile. A trainer works on a node-local
copy, because a compiler writes into the cache that it reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from services.common.artifacts.manifest import Count, Manifest, ManifestModel, Phase, Sha256
from services.common.artifacts.store import Address
from services.common.recipe.schema import Device, Recipe

GRAPHS = "graphs"
"""Subfolder that holds the compiler's cache directory."""


class CompileCachePayload(ManifestModel):
    target: Device
    """`parallel.device` of the recipe."""
    program_fingerprint: Sha256
    facts: dict[str, Any]
    """Facts of which `program_fingerprint` is the hash, so that an error can name those that differ."""
    graphs_compiled: Annotated[int, Field(ge=1)]
    graphs_missed_by_verification: Literal[0]
    """Graphs that a second process still had to compile when it used this cache."""
    world_size_traced: Count
    phases: tuple[Phase, ...]


def compile_cache_name(recipe: Recipe) -> str:
    """Return the name of the cache's collection: recipes of any name with the same program share one cache."""
    return recipe.parallel.device


def compile_cache_address(root: Path, recipe: Recipe, program_fingerprint: str) -> Address:
    """Return the address at which the compiler publishes the cache of this program, and the trainer opens it."""
    return Address(root, "compile_cache", compile_cache_name(recipe), program_fingerprint[:16])


class CompileCacheManifest(Manifest):
    SCHEMA: ClassVar[str] = "compile_cache/1"

    compile_cache: CompileCachePayload
