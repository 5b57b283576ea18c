"""Writes and reads run.json, which describes a run by its recipe and its artifacts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from services.common.artifacts.checkpoint import Ancestor
from services.common.artifacts.manifest import ManifestModel, write_durably
from services.common.errors import ArtifactError, unreadable
from services.trainer.job import RUN_FILE, Job

logger = logging.getLogger(__name__)

SCHEMA: Final = "run/1"


class RunDescription(ManifestModel):
    """Content of run.json. Its artifacts are named by their paths below the root: a root may be moved."""

    schema_id: Annotated[Literal["run/1"], Field(alias="schema")] = SCHEMA
    run: str
    recipe: dict[str, Any]
    artifacts: dict[str, str]
    """Ids of the corpus, or of those of a mixture with their weights, and of the compile cache."""
    paths: dict[str, str]
    """Paths of these and of the checkpoints; absolute if `--corpus` or `--cache` named a folder outside the root."""
    parent: Ancestor | None = None
    """Checkpoint of another run that this one began with; None if it is no branch."""


def read_description(run_folder: Path) -> RunDescription:
    """Read run.json. Raises `ArtifactError` where it is absent or damaged."""
    path = run_folder / RUN_FILE
    try:
        return RunDescription.model_validate_json(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise damaged_description(run_folder, error) from error


def damaged_description(run_folder: Path, error: object) -> ArtifactError:
    return ArtifactError(
        f"{run_folder / RUN_FILE}: damaged, or of another version: {error}. "
        f"The trainer's command for this recipe writes it again."
    )


def write_run(job: Job) -> None:
    """Write run.json."""
    artifacts = {"corpus": job.corpus.id}
    paths = {"corpus": job.corpus.path, "checkpoints": job.checkpoint_collection}
    paths |= {f"corpus {part.name}": part.path for part in job.corpus.mixed}
    if job.cache:
        artifacts["compile_cache"], paths["compile_cache"] = job.cache.manifest.id, job.cache.path
    described = RunDescription(
        run=job.run,
        recipe=job.recipe.model_dump(mode="json"),
        artifacts=artifacts,
        paths={name: _below(job.root, path) for name, path in paths.items()},
        parent=job.lineage.parent,
    )
    (job.run_folder / "logs").mkdir(parents=True, exist_ok=True)
    write_durably(job.run_folder / RUN_FILE, described.model_dump_json(by_alias=True, indent=1).encode())


def _below(root: Path, path: Path) -> str:
    path, root = path.absolute(), root.absolute()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
