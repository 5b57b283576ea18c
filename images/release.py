"""Releases one service: writes the new version and its changelog section, commits and tags. It pushes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from images.platforms import REPOSITORY, read_digests, read_platforms
from images.versions import git, require_full_history
from services.common.errors import DeviceError, RecipeError

BUMPS = ("major", "minor", "patch")
UNRELEASED = "## [Unreleased]"


def release(service: str, bump: str, repository: Path = REPOSITORY) -> str:
    """Raise VERSION, move the changelog's Unreleased section, commit, tag, and return the tag.

    Raises `RecipeError` or `DeviceError` for a shallow clone, uncommitted changes, a changelog without an entry, a tag
    that exists, a base image of a variant for Trainium without a digest, and an artifact schema whose fields changed
    since the last release of any service while its name did not. After an error nothing is changed.
    """
    folder = repository / "services" / service
    version_file, changelog = folder / "VERSION", folder / "CHANGELOG.md"
    version = bumped(version_file.read_text(encoding="utf-8").strip(), bump)
    tag = f"{service}-v{version}"
    require_full_history(repository)
    _require_clean(repository)
    _require_new_tag(repository, service, tag)
    moved = with_section(changelog.read_text(encoding="utf-8"), version, changelog)
    _require_pinned_base(repository, service)
    _require_schema_bump(repository)
    before = git(repository, "rev-parse", "HEAD")
    try:
        version_file.write_text(f"{version}\n", encoding="utf-8")
        changelog.write_text(moved, encoding="utf-8")
        git(repository, "add", str(version_file), str(changelog))
        git(repository, "commit", "--quiet", "--message", f"Release {service} {version}")
        git(repository, "tag", "--annotate", tag, "--message", f"{service} {version}")
    except (DeviceError, KeyboardInterrupt):
        git(repository, "reset", "--quiet", "--hard", before)  # loses nothing: there were no uncommitted changes
        raise
    return tag


def bumped(version: str, bump: str) -> str:
    """The next version by the rules of Semantic Versioning."""
    if bump not in BUMPS:
        raise RecipeError(f"BUMP is {bump!r}, expected one of {', '.join(BUMPS)}")
    major, minor, patch = map(int, version.split("."))
    return {
        "major": f"{major + 1}.0.0",
        "minor": f"{major}.{minor + 1}.0",
        "patch": f"{major}.{minor}.{patch + 1}",
    }[bump]


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


def changed_schemas(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of the schemas whose fields changed."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _require_clean(repository: Path) -> None:
    changes = git(repository, "status", "--porcelain")
    if changes:
        raise RecipeError(f"there are uncommitted changes, and a release is a commit. Commit or stash them:\n{changes}")


def _require_new_tag(repository: Path, service: str, tag: str) -> None:
    if git(repository, "tag", "--list", tag):
        raise RecipeError(
            f"the tag {tag} exists, and services/{service}/VERSION is older. Set VERSION to the newest released "
            f"version of {service}, commit, and release again."
        )


def _require_pinned_base(repository: Path, service: str) -> None:
    platforms = repository / "images/platforms.toml"
    for platform in read_platforms(platforms).values():
        base = platform.base_of(service)
        if platform.sdk and base not in read_digests(platforms):
            raise DeviceError(
                f"the {platform.variant} variant's base image {base} has no digest in images/platforms.toml, and its "
                f"tag can be moved to another image. Run `make lock PIN=1` on a machine that reaches its registry, and "
                f"commit the file."
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
            f"services/common: the fields of {', '.join(changed)} changed since {tags[0]}, and its name did not. "
            f"Released programs would misread it: give the schema the next number, and an upgrade function."
        )


# A separate Python runs this in each of the two trees: one process cannot import both.
_PRINT_SCHEMAS = """
import json
from services.common.artifacts.__main__ import MANIFEST_TYPES
def shape(value):
    if isinstance(value, dict):
        # Texts are Pydantic's descriptions of a field. A field that is called title or description has a table.
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
        raise DeviceError(f"the artifact schemas in {tree} could not be read:\n{done.stderr.strip()}")
    return dict(json.loads(done.stdout))
