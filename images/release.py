"""Releases one service: writes the new version and its changelog section, commits and tags. It pushes nothing."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from images.platforms import REPOSITORY, version_numbers
from images.versions import git, require_full_history
from services.common.errors import DeviceError, RecipeError

UNRELEASED = "## [Unreleased]"
MANIFESTS = "tests/contract/manifests"


def release(service: str, version: str, repository: Path = REPOSITORY) -> str:
    """Write VERSION, move the changelog's Unreleased section below it, commit, tag, and return the tag.

    Raises `RecipeError` or `DeviceError` for a shallow clone, uncommitted changes, a version that is no newer one, a
    changelog without an entry, and a golden manifest that changed since the last release of any service while its
    number did not. After an error nothing is changed.
    """
    version_file, changelog = (repository / "services" / service / name for name in ("VERSION", "CHANGELOG.md"))
    tag = f"{service}-v{version}"
    require_full_history(repository)
    if changes := git(repository, "status", "--porcelain"):
        raise RecipeError(f"there are uncommitted changes, and a release is a commit. Commit or stash them:\n{changes}")
    _require_new_version(repository, version_file.read_text(encoding="utf-8").strip(), version, tag)
    moved = with_section(changelog.read_text(encoding="utf-8"), version, changelog)
    _require_schema_bump(repository)
    before = git(repository, "rev-parse", "HEAD")
    try:
        version_file.write_text(f"{version}\n", encoding="utf-8")
        changelog.write_text(moved, encoding="utf-8")
        git(repository, "commit", "--quiet", "--message", f"Release {service} {version}", "--all")
        git(repository, "tag", "--annotate", tag, "--message", f"{service} {version}")
    except (DeviceError, KeyboardInterrupt):
        git(repository, "reset", "--quiet", "--hard", before)  # loses nothing: there were no uncommitted changes
        raise
    return tag


def with_section(changelog: str, version: str, path: Path) -> str:
    """Move the changelog's Unreleased entries below a heading for `version`. Raises `RecipeError` without entries."""
    before, found, after = changelog.partition(UNRELEASED)
    entries, next_heading, older = after.partition("\n## ")
    if not found or not re.search(r"^[-*] \S", entries, flags=re.MULTILINE):
        raise RecipeError(
            f"{path}: there is no entry under {UNRELEASED!r}. Write what changes for users of this stage, commit, and "
            f"release again."
        )
    today = datetime.now(UTC).date().isoformat()
    return f"{before}{UNRELEASED}\n\n## [{version}] - {today}\n{entries.strip()}\n{next_heading}{older}"


def _require_new_version(repository: Path, current: str, version: str, tag: str) -> None:
    is_version = re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version)
    if not is_version or version_numbers(version) < version_numbers(current) or git(repository, "tag", "--list", tag):
        raise RecipeError(
            f"VERSION is {version!r}, expected MAJOR.MINOR.PATCH after {current}, of which no tag {tag} exists"
        )


def _require_schema_bump(repository: Path) -> None:
    """Golden manifests, whose structure the tests hold artifacts to, are those of the last release, or new ones."""
    tags = git(repository, "tag", "--list", "*-v*.*.*", "--merged", "HEAD", "--sort=-creatordate").splitlines()
    if tags and (changed := git(repository, "diff", "--name-only", "--diff-filter=M", tags[0], "--", MANIFESTS)):
        raise RecipeError(
            f"{changed.split()} changed since {tags[0]}, and released programs would misread such artifacts: give the "
            f"schema the next number, and replace its golden manifest by one of that number."
        )
