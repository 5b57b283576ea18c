"""Small artifacts for tests, published as the stages publish theirs: compile caches and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from services.common.artifacts.checkpoint import (
    CheckpointManifest,
    CheckpointPayload,
    checkpoint_id,
    shard_name,
)
from services.common.artifacts.compile_cache import CompileCacheManifest, CompileCachePayload
from services.common.artifacts.manifest import InputLink
from services.common.artifacts.store import Address, Artifact, Draft, Workspace, publish_once
from services.common.recipe.schema import Recipe, fingerprint, identity

ID = "0123456789abcdef"
CORPUS = InputLink(schema_id="corpus/2", path="/corpus/small", id="fedcba9876543210", content_digest="0" * 64)
FACTS = {"torch": "none"}
FILES = {"graphs/ab/inner/one.bin": b"one" * 100, "graphs/two.bin": b"two" * 100, "three.json": b"{}"}


def fill(workspace: Workspace, files: Mapping[str, bytes] = FILES, inputs: tuple[InputLink, ...] = ()) -> Draft:
    """What a stage's `build` does: write the files and describe them, as a compile cache."""
    for name, content in files.items():
        path = workspace.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    payload = CompileCachePayload(
        target="cpu",
        program_fingerprint=fingerprint(FACTS),
        facts=FACTS,
        graphs_compiled=2,
        graphs_missed_by_verification=0,
        world_size_traced=1,
        phases=(),
    )
    return Draft(payload, inputs)


def address_in(root: Path, identifier: str = ID) -> Address:
    return Address(root, "compile_cache", "small", identifier)


def publish(
    root: Path, recipe: Recipe, identifier: str = ID, build: Callable[[Workspace], Draft] = fill
) -> tuple[Artifact[CompileCacheManifest], bool]:
    """A compile cache that says of its program what is true of the recipe, and whether it is new."""

    def build_of_recipe(workspace: Workspace) -> Draft:
        draft = build(workspace)
        facts = {**draft.payload.facts, "recipe": identity(recipe, "compile_cache")}
        said = {
            "target": recipe.parallel.device,
            "facts": facts,
            "program_fingerprint": fingerprint(facts),
            "world_size_traced": recipe.parallel.num_workers,
        }
        return replace(draft, payload=draft.payload.model_copy(update=said))

    address = Address(root, "compile_cache", recipe.name, identifier)
    return publish_once(address, CompileCacheManifest, "compiler", recipe, build_of_recipe)


def publish_checkpoint(
    root: Path, recipe: Recipe, step: int, waivers: tuple[str, ...] = (), inputs: tuple[InputLink, ...] = (CORPUS,)
) -> Artifact[CheckpointManifest]:
    """A checkpoint whose file has no bytes."""
    run = f"{recipe.name}-{0:08x}"
    state = CheckpointPayload(
        step=step,
        tokens=1,
        skipped_steps=0,
        data_parallel_size=1,
        tensor_parallel_size=1,
        zero_stage=0,
        shards={},
        program_fingerprint="eager",
        waivers=waivers,
    ).with_shards(run, {shard_name(0): 0})

    def build(workspace: Workspace) -> Draft:
        fill(workspace, {shard_name(0): b""})
        return Draft(state, inputs)

    address = Address(root, "checkpoint", run, checkpoint_id(step))
    return publish_once(address, CheckpointManifest, "trainer", recipe, build)[0]
