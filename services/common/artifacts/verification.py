"""Verifies one artifact from its folder alone: bytes, counts, ids, vocabulary and recipe."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from pydantic import ValidationError

from services.common.artifacts.checkpoint import CheckpointManifest, step_of
from services.common.artifacts.compile_cache import GRAPHS, CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import locate
from services.common.artifacts.manifest import Manifest
from services.common.artifacts.shared_verification import verify_on_nodes, verify_rows_on_nodes
from services.common.artifacts.store import identity_key, is_id
from services.common.errors import ArtifactError, DeviceError
from services.common.launch.launcher import Launcher
from services.common.recipe.schema import Recipe, fingerprint
from services.common.recipe.section import Kind


def verify_artifact(folder: Path, manifest: Manifest, launcher: Launcher) -> None:
    """Check an artifact's files on all nodes of the launcher, and its manifest against files, recipe and place.

    Raises `ArtifactError` for damage or a contradiction, and `DeviceError` without a library for the vocabulary. All
    files are read twice, those of a corpus three times; on one machine the kernel's cache may have them from the second
    time on.
    """
    verify_on_nodes(launcher, folder, manifest, "provenance")
    if isinstance(manifest, CorpusManifest):
        verify_rows_on_nodes(launcher, folder, manifest.corpus)
        _verify_vocabulary(folder, manifest)
    recipe = _require_own_recipe(folder, manifest)
    if isinstance(manifest, CompileCacheManifest):
        _require_own_program(folder, manifest, recipe)
    _require_own_place(folder, manifest)


def _verify_vocabulary(folder: Path, manifest: CorpusManifest) -> None:
    """Raise `ArtifactError` unless the vocabulary's library reads its file and decodes BOS and EOS, and `DeviceError`
    where that library is not installed.
    """
    vocabulary = manifest.corpus.vocabulary
    path = locate(folder, vocabulary.path)
    try:
        # The images of the compiler and of the head have no library of vocabularies, and Pants leaves this package out.
        from services.common.vocabularies.codec import load_codec  # noqa: PLC0415  # pants: no-infer-dep

        codec = load_codec(path, vocabulary)
    except ImportError as error:
        raise DeviceError(
            f"{path}: this environment cannot read a {vocabulary.kind} vocabulary ({error}). Verify the corpus in the "
            f"image of the tokenizer or of the trainer, which can."
        ) from error
    try:
        codec.decode([vocabulary.bos_id, vocabulary.eos_id])
    except (LookupError, ValueError, OverflowError) as error:
        raise ArtifactError(
            f"{path}: does not have BOS {vocabulary.bos_id:,} and EOS {vocabulary.eos_id:,} of the manifest: {error}. "
            f"Move the corpus away and run the tokenizer stage to make it anew."
        ) from error


def _require_own_recipe(folder: Path, manifest: Manifest) -> Recipe:
    """Return the manifest's recipe. Raises `ArtifactError` unless the manifest has that recipe's identity and name."""
    kind = cast("Kind", manifest.kind)
    try:
        recipe = Recipe.model_validate(manifest.recipe)
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(
            f"{folder}: this program cannot read the recipe in its manifest: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}. Verify it with the version of Millrace that made it."
        ) from error
    key = identity_key(recipe, kind)
    if manifest.identity_key != key:
        raise ArtifactError(
            f"{folder}: the manifest has identity_key {manifest.identity_key[:12]}, its recipe has {key[:12]}: one of "
            f"them belongs to another artifact. Move the folder away and run the stage again."
        )
    name = recipe.corpus.name if kind == "corpus" else recipe.name
    is_own = manifest.name.rpartition("-")[0] == name if kind == "checkpoint" else manifest.name == name
    if not is_own:
        raise ArtifactError(
            f"{folder}: the manifest has the name {manifest.name}, its recipe has {name}: one of them belongs to "
            f"another artifact. Move the folder away and run the stage again."
        )
    return recipe


def _require_own_program(folder: Path, manifest: CompileCacheManifest, recipe: Recipe) -> None:
    """Raise `ArtifactError` unless a compile cache fits its recipe's device and workers, and holds graphs."""
    cache = manifest.compile_cache
    facts = {
        "the identity of its facts' recipe": (fingerprint(cache.facts.get("recipe")), manifest.identity_key),
        "target": (cache.target, recipe.parallel.device),
        "world_size_traced": (cache.world_size_traced, recipe.parallel.num_workers),
        "whether it has files of graphs": (any(entry.path.startswith(f"{GRAPHS}/") for entry in manifest.files), True),
    }
    wrong = [f"{what}: {found}, expected {expected}" for what, (found, expected) in facts.items() if found != expected]
    if wrong:
        raise ArtifactError(
            f"{folder}: the manifest contradicts itself:\n  "
            + "\n  ".join(wrong)
            + "\nMove the folder away and run the stage again."
        )


def _require_own_place(folder: Path, manifest: Manifest) -> None:
    """Raise `ArtifactError` where the folder's name is an id other than the manifest's. A copy under a name that a
    person chose is as good as the artifact.
    """
    own = folder.absolute().name
    if (is_id(own) and manifest.id != own) or (
        isinstance(manifest, CheckpointManifest) and step_of(manifest.id) != manifest.checkpoint.step
    ):
        raise ArtifactError(
            f"{folder}: the manifest has the id {manifest.id}: the folder is a copy of that artifact. Move it away, or "
            f"back to that name."
        )
