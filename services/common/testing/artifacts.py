"""Publishes small compile caches and checkpoints for tests, as the stages publish theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from services.common.artifacts.checkpoint import (
    INDEX_FILE,
    BatchRange,
    CheckpointManifest,
    CheckpointPayload,
    LossSpikes,
    checkpoint_id,
    shard_name,
)
from services.common.artifacts.compile_cache import CompileCacheManifest, CompileCachePayload, compile_cache_name
from services.common.artifacts.manifest import InputLink
from services.common.artifacts.store import Address, Artifact, Draft, Workspace, publish_once
from services.common.recipe.schema import Recipe, fingerprint, identity

ID = "0123456789abcdef"
CORPUS = InputLink(schema_id="corpus/5", path="/corpus/small", id="fedcba9876543210", content_digest="0" * 64)
FACTS = {"torch": "none"}
FILES = {"graphs/ab/inner/one.bin": b"one" * 100, "graphs/two.bin": b"two" * 100, "three.json": b"{}"}


def fill(workspace: Workspace, files: Mapping[str, bytes] = FILES, inputs: tuple[InputLink, ...] = ()) -> Draft:
    """Write the files and describe them as a compile cache, which is the work of a stage's `build`."""
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
    return Address(root, "compile_cache", "cpu", identifier)


def publish(
    root: Path, recipe: Recipe, identifier: str = ID, build: Callable[[Workspace], Draft] = fill
) -> tuple[Artifact[CompileCacheManifest], bool]:
    """Publish a compile cache whose program fits the recipe; return it, and whether this call built it."""

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

    address = Address(root, "compile_cache", compile_cache_name(recipe), identifier)
    return publish_once(address, CompileCacheManifest, "compiler", recipe, build_of_recipe)


LOSS_SPIKES = LossSpikes(
    skipped_batches=(BatchRange(first=1, last=3),),
    rollbacks=1,
    recent_losses=(5.5,),
    recent_gradient_norms=(1.25,),
    first_deviating_step=1,
    deviating_losses=1,
)
"""State of a run that has gone back once, with each of its fields."""


def make_payload(run: str, step: int, waivers: tuple[str, ...] = ()) -> CheckpointPayload:
    """Make the payload of a checkpoint of one worker, which has one shard."""
    return CheckpointPayload(
        step=step,
        tokens=1,
        skipped_steps=0,
        data_parallel_size=1,
        tensor_parallel_size=1,
        zero_stage=0,
        shards={},
        program_fingerprint="eager",
        waivers=waivers,
        loss_spikes=LOSS_SPIKES,
    ).with_shards(run, {shard_name(0): 0})


def publish_checkpoint(
    root: Path, recipe: Recipe, step: int, waivers: tuple[str, ...] = (), inputs: tuple[InputLink, ...] = (CORPUS,)
) -> Artifact[CheckpointManifest]:
    """Publish a checkpoint whose shard and index are empty files."""
    run = f"{recipe.name}-{0:08x}"
    state = make_payload(run, step, waivers)

    def build(workspace: Workspace) -> Draft:
        fill(workspace, {INDEX_FILE: b"", shard_name(0): b""})
        return Draft(state, inputs)

    address = Address(root, "checkpoint", run, checkpoint_id(step))
    return publish_once(address, CheckpointManifest, "trainer", recipe, build)[0]
