"""Releases one service: a new version, its changelog section, a commit and a tag. Nothing is pushed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from images.pin import unpinned_bases
from images.platforms import REPOSITORY
from images.versions import git, require_full_history
from services.common.errors import DeviceError, RecipeError

BUMPS = ("major", "minor", "patch")
UNRELEASED = "## [Unreleased]"


@dataclass(frozen=True)
class Release:
    service: str
    version: str

    @property
    def tag(self) -> str:
        return f"{self.service}-v{self.version}"


def release(service: str, bump: str, repository: Path = REPOSITORY) -> Release:
    """Bump VERSION, move the changelog's Unreleased section, commit, tag; all of it or nothing.

    Refused: a shallow clone, a dirty tree, a changelog without an entry, a tag that exists, a base of the neuron
    variant without a digest, and an artifact schema that changed under its old name since the last release of any.
    """
    folder = repository / "services" / service
    version_file, changelog = folder / "VERSION", folder / "CHANGELOG.md"
    new = Release(service, bumped(version_file.read_text(encoding="utf-8").strip(), bump))
    require_full_history(repository)
    _require_clean(repository)
    _require_new_tag(repository, new)
    moved = with_section(changelog.read_text(encoding="utf-8"), new.version, changelog)
    _require_pinned_base(repository, service)
    _require_schema_bump(repository)
    before = git(repository, "rev-parse", "HEAD")
    try:
        version_file.write_text(f"{new.version}\n", encoding="utf-8")
        changelog.write_text(moved, encoding="utf-8")
        git(repository, "add", str(version_file), str(changelog))
        git(repository, "commit", "--quiet", "--message", f"Release {service} {new.version}")
        git(repository, "tag", "--annotate", new.tag, "--message", f"{service} {new.version}")
    except (DeviceError, KeyboardInterrupt):
        git(repository, "reset", "--quiet", "--hard", before)  # the tree was clean
        raise
    return new


def bumped(version: str, bump: str) -> str:
    """The next version by Semantic Versioning."""
    if bump not in BUMPS:
        raise RecipeError(f"BUMP is {bump!r}, expected one of {', '.join(BUMPS)}")
    major, minor, patch = map(int, version.split("."))
    return {
        "major": f"{major + 1}.0.0",
        "minor": f"{major}.{minor + 1}.0",
        "patch": f"{major}.{minor}.{patch + 1}",
    }[bump]


def with_section(changelog: str, version: str, path: Path) -> str:
    """The changelog with its Unreleased entries under a heading for `version`. Raises `RecipeError` without any."""
    before, found, after = changelog.partition(UNRELEASED)
    entries, next_heading, older = after.partition("\n## ")
    if not found or not re.search(r"^[-*] \S", entries, flags=re.MULTILINE):
        raise RecipeError(
            f"{path}: nothing stands under {UNRELEASED!r}. Write what users of this stage get, then release again."
        )
    today = datetime.now(UTC).date().isoformat()
    return f"{before}{UNRELEASED}\n\n## [{version}] - {today}\n{entries.strip()}\n{next_heading}{older}"


def changed_schemas(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Schemas that have the name they had and another shape."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _require_clean(repository: Path) -> None:
    changes = git(repository, "status", "--porcelain")
    if changes:
        raise RecipeError(f"the tree is dirty; commit or stash first, a release is a commit:\n{changes}")


def _require_new_tag(repository: Path, new: Release) -> None:
    if git(repository, "tag", "--list", new.tag):
        raise RecipeError(
            f"the tag {new.tag} exists, and services/{new.service}/VERSION is older than it. Set VERSION to the newest "
            f"released version of {new.service}, commit, and release again."
        )


def _require_pinned_base(repository: Path, service: str) -> None:
    missing = unpinned_bases(service, repository / "images/platforms.toml")
    if missing:
        raise DeviceError(
            f"the neuron variant's base is pinned by tag alone: {', '.join(missing)}. A tag can move under a release: "
            f"run `make pin` where that registry is reached, and commit images/platforms.toml."
        )


def _require_schema_bump(repository: Path) -> None:
    tags = git(repository, "tag", "--list", "*-v*.*.*", "--merged", "HEAD", "--sort=-creatordate").splitlines()
    if not tags:
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "released.tar"
        git(repository, "archive", "--output", str(archive), tags[0], "services/common")
        shutil.unpack_archive(archive, folder)
        changed = changed_schemas(_schemas_of(Path(folder)), _schemas_of(repository))
    if changed:
        raise RecipeError(
            f"services/common: {', '.join(changed)} changed its fields since {tags[0]} and kept its name. Programs "
            f"that were released before would misread it: give it the next number, and an upgrade from the old one."
        )


# Run by a Python of its own in each of the two trees: one process cannot hold both.
_PRINT_SCHEMAS = """
import json
from services.common.artifacts.__main__ import MANIFEST_TYPES
def shape(value):
    if isinstance(value, dict):
        # Pydantic's own words about a field; a field of that name has a table here, not a text.
        return {
            key: shape(each)
            for key, each in value.items()
            if key not in ("title", "description") or not isinstance(each, str)
        }
    return [shape(each) for each in value] if isinstance(value, list) else value
print(json.dumps({each.SCHEMA: shape(each.model_json_schema()) for each in MANIFEST_TYPES.values()}))
"""


def _schemas_of(tree: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", _PRINT_SCHEMAS]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise DeviceError(f"the artifact schemas of {tree} could not be read:\n{done.stderr.strip()}")
    return dict(json.loads(done.stdout))
