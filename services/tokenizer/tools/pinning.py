"""`pin` replaces branches of the Hugging Face hub in recipes by the commits that they point to now."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Source
from services.tokenizer.sources.hub import DATASETS, is_commit

_REVISION = re.compile(r'(\brevision\s*=\s*")([^"]*)(")')


def pin(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="TOML files, which are rewritten")],
) -> int:
    """Replace branches and tags in `revision` keys of recipes by the commits that they point to now.

    A recipe is rewritten only when all of its revisions are found.
    """
    for path in recipes:
        _pin(path)
    return 0


def _pin(path: Path) -> None:
    sources = [source for source in load_recipe(path).corpus.sources if source.revision is not None]
    moving = [source for source in sources if not is_commit(str(source.revision))]
    commits = {(source.uri, source.revision): _resolve(source) for source in moving}
    if not commits:
        print(f"{path}: nothing to pin")
        return
    write_durably(path, _replace(path, sources, commits).encode())
    for (uri, revision), commit in commits.items():
        print(f"{path}: {uri}: {revision} is {commit}")


def _replace(path: Path, sources: Sequence[Source], commits: dict[tuple[str, str | None], str]) -> str:
    """Return the recipe's text, comments included, with commits instead of branches and tags."""
    text = path.read_text(encoding="utf-8-sig")
    uncommented = [match for match in _REVISION.finditer(text) if "#" not in text[: match.start()].rpartition("\n")[2]]
    if [match[2] for match in uncommented] != [source.revision for source in sources]:
        raise RecipeError(
            f'{path}: a revision is not written as `revision = "..."`. Write the commits into the recipe by hand.'
        )
    for match, source in reversed(list(zip(uncommented, sources, strict=True))):
        commit = commits.get((source.uri, source.revision), match[2])
        text = text[: match.start(2)] + commit + text[match.end(2) :]
    return text


def _resolve(source: Source) -> str:
    import huggingface_hub  # noqa: PLC0415 - takes half a second
    import huggingface_hub.errors  # noqa: PLC0415

    kind, repository = _repository_of(source)
    try:
        found = huggingface_hub.HfApi().repo_info(repository, repo_type=kind, revision=source.revision)
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.RevisionNotFoundError) as error:
        raise RecipeError(f"{source.uri}: the hub has no revision {source.revision!r}: {error}") from error
    except Exception as error:  # errors of the network and the account have no common class
        raise DeviceError(f"{source.uri}: the hub does not answer, and the recipe is unchanged: {error}") from error
    return str(found.sha)


def _repository_of(source: Source) -> tuple[str, str]:
    """Return the repository's kind and name as arguments of `HfApi.repo_info`."""
    if source.uri.startswith(DATASETS):
        return "dataset", source.uri.removeprefix(DATASETS)
    parts = source.uri.removeprefix("hf://").split("/")
    kind = parts.pop(0).removesuffix("s") if parts[0] in ("datasets", "spaces") else "model"
    return kind, "/".join(parts[:2])
