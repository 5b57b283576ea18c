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

from images.platforms import REPOSITORY, read_digests, read_platforms, version_numbers
from images.versions import git, require_full_history
from services.common.errors import DeviceError, RecipeError

UNRELEASED = "## [Unreleased]"


def release(service: str, version: str, repository: Path = REPOSITORY) -> str:
    """Write VERSION, move the changelog's Unreleased section below it, commit, tag, and return the tag.

    Raises `RecipeError` or `DeviceError` for a shallow clone, uncommitted changes, a version that is no newer one, a
    changelog without an entry, a base image of a variant for Trainium without a digest, and an artifact schema whose
    fields changed since the last release of any service while its name did not. After an error nothing is changed.
    """
    version_file, changelog = (repository / "services" / service / name for name in ("VERSION", "CHANGELOG.md"))
    tag = f"{service}-v{version}"
    require_full_history(repository)
    if changes := git(repository, "status", "--porcelain"):
        raise RecipeError(f"there are uncommitted changes, and a release is a commit. Commit or stash them:\n{changes}")
    _require_new_version(repository, version_file.read_text(encoding="utf-8").strip(), version, tag)
    moved = with_section(changelog.read_text(encoding="utf-8"), version, changelog)
    _require_pinned_base(repository, service)
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
        released, now = _schemas_of(Path(folder)), _schemas_of(repository)
    if changed := sorted(name for name in released.keys() & now.keys() if released[name] != now[name]):
        raise RecipeError(
            f"services/common: the fields of {', '.join(changed)} changed since {tags[0]}, and its name did not. "
            f"Released programs would misread it: give the schema the next number, and an upgrade function."
        )


# A separate Python runs this in each of the two trees: one process cannot import both. A text is Pydantic's description
# of a field; a field that is called title or description has a table.
_PRINT_SCHEMAS = """
import json
from services.common.artifacts.__main__ import MANIFEST_TYPES
schemas = json.dumps({each.SCHEMA: each.model_json_schema() for each in MANIFEST_TYPES.values()})
def shape(table):
    return {
        key: value
        for key, value in table.items()
        if key not in ("title", "description") or not isinstance(value, str)
    }
print(json.dumps(json.loads(schemas, object_hook=shape)))
"""


def _schemas_of(tree: Path) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", "-c", _PRINT_SCHEMAS]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(f"the artifact schemas in {tree} could not be read:\n{done.stderr.strip()}")
    return dict(json.loads(done.stdout))
