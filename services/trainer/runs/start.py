"""Describes the start of a command: the run's name, its first step, and the difference from the run before."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import ArtifactError, MillraceError
from services.common.problem_list import list_problems
from services.common.recipe.changes import changed_fields
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.lookup import newest_checkpoint, verify_sizes
from services.trainer.job import RUN_FILE, RunCorpus, checkpoint_collection, completed_step, run_folder, run_name
from services.trainer.runs.branch import describe_parent, find_lineage
from services.trainer.runs.description import RunDescription, read_description


def describe_start(root: Path, recipe: Recipe, corpus: RunCorpus | ArtifactError) -> dict[str, str]:
    """Return the rows of `--dry-run` with the run's name and the step at which it begins.

    This reads manifests, and compares the sizes of the newest checkpoint's files.
    """
    if isinstance(corpus, ArtifactError):
        return {"run": f"{recipe.name}-..., completed by the corpus: {corpus}"}
    last = f"{recipe.train.max_steps:,}"
    try:
        lineage = find_lineage(root, recipe, corpus)
    except ArtifactError as error:
        return {"run": f"{recipe.name}-..., completed by its parent's checkpoint: {error}"}
    rows = {"run": run_name(recipe, corpus, lineage.parent)}
    try:
        checkpoint = newest_checkpoint(checkpoint_collection(root, rows["run"]), verify_sizes)
    except ArtifactError as error:
        return rows | {"starts at step": f"unknown: {error}"}
    step = completed_step(checkpoint)
    if step >= recipe.train.max_steps:
        return rows | {"starts at step": f"none: the run is complete, {step:,} of {last}"}
    if checkpoint:
        return rows | {"starts at step": f"{step:,} of {last}, from {checkpoint.path}"}
    first = lineage.parent.step if lineage.parent else 0
    rows["starts at step"] = f"{first:,} of {last}: a new run"
    if lineage.parent:
        rows["branches from"] = describe_parent(root, recipe, corpus, lineage)
    elif before := explain_new_run(root, recipe, corpus):
        rows["differs from"] = before
    return rows


def explain_new_run(root: Path, recipe: Recipe, corpus: RunCorpus) -> str:
    """Return the newest other run of the recipe's name and the fields in which it differs; empty if there is none."""
    before = _newest_other_run(root, recipe.name, run_name(recipe, corpus))
    if before is None:
        return ""
    try:
        changed = _changes(read_description(before), recipe, corpus)
    except (MillraceError, ValueError) as error:  # ValueError: the recipe of another version
        return f"{before.name}, whose {RUN_FILE} cannot be read: {error}"
    return f"{before.name}: {', '.join(list_problems(changed, 'fields that differ'))}"


def _newest_other_run(root: Path, name: str, run: str) -> Path | None:
    """Return the folder of the other run of this name that was started last."""
    found = run_folder(root, "").glob(f"{name}-{'[0-9a-f]' * 8}/{RUN_FILE}")
    others = [path for path in found if path.parent.name != run]
    return max(others, key=lambda path: path.stat().st_mtime).parent if others else None


def _changes(described: RunDescription, recipe: Recipe, corpus: RunCorpus) -> list[str]:
    """List the differences between a run's description, from its file, and the recipe's run."""
    stored, before = described.recipe, described.artifacts.get("corpus")
    changed = [*changed_fields(stored, recipe, "checkpoint"), *changed_fields(stored, recipe, "corpus")]
    if not changed and before != corpus.id:
        changed.append(f"the corpus was {before} and is {corpus.id}")
    return list(dict.fromkeys(changed)) or ["no recipe field; the trainer's version or the bytes of the corpus differ"]
