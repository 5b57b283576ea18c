"""Revisions of sources on the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from urllib.parse import quote

from services.common.errors import RecipeError, shell_command

logger = logging.getLogger(__name__)

DATASETS = "datasets://"
_REPOSITORY = re.compile(r"^hf://((datasets|spaces)/)?(?!(datasets|spaces)/)[^/@]+/[^/@]+(?=/|$)")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


def with_revision(uri: str, revision: str | None) -> str:
    """Return the URI of the same files at a revision, as huggingface_hub's file system spells it."""
    if revision is None:
        return uri
    warn_of_branch(uri, revision)
    repository = _REPOSITORY.match(uri)
    if repository is None:
        raise RecipeError(
            f"{uri}: `revision` needs a URI like hf://datasets/OWNER/NAME/FOLDER, and the URI must not hold a revision."
        )
    return f"{repository[0]}@{quote(revision, safe='')}{uri.removeprefix(repository[0])}"


def is_commit(revision: str) -> bool:
    return _COMMIT.match(revision) is not None


def warn_of_branch(uri: str, revision: str) -> None:
    """Warn of a revision that is no commit."""
    if not is_commit(revision):
        logger.warning("%s: %r may change: %s pins it", uri, revision, shell_command("services.tokenizer", "pin"))
