"""What a build of a service is called: its version, the commit that its sources are at, the tags of its image.

The commit is the last one that changed something the image is made from, so a commit that touches the trainer alone
gives the tokenizer no new tag.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from images.platforms import REPOSITORY, STAGES_WITH_PROGRAM


@dataclass(frozen=True)
class Build:
    """One service at one state of the sources, for one variant."""

    service: str
    variant: str
    version: str
    commit: str
    """Full commit id; `unknown` outside of a git checkout."""
    change: str
    """Hash of the image's sources where they differ from the commit, else empty."""

    @property
    def git_sha(self) -> str:
        return f"{self.commit}-dirty{self.change}" if self.change else self.commit

    @property
    def tag(self) -> str:
        return f"{self.version}-{self.variant}"

    @property
    def commit_tag(self) -> str:
        dirt = f"-dirty{self.change}" if self.change else ""
        return f"{self.version}-g{self.commit[:7]}{dirt}-{self.variant}"


def describe_build(service: str, variant: str, repository: Path = REPOSITORY) -> Build:
    """The build that the working tree would make now."""
    version = (repository / "services" / service / "VERSION").read_text(encoding="utf-8").strip()
    sources = sources_of(service, variant)
    commit = _git(repository, "log", "-1", "--format=%H", "--", *sources)
    if not commit:
        return Build(service, variant, version, "unknown", "")
    is_changed = bool(_git(repository, "status", "--porcelain", "--", *sources))
    return Build(service, variant, version, commit, _digest(repository, sources) if is_changed else "")


def is_released(build: Build, repository: Path = REPOSITORY) -> bool:
    """Are the image's sources those of the tag that released this version?"""
    tag = f"{build.service}-v{build.version}"
    if build.change or not _git(repository, "tag", "--list", tag):
        return False
    return not _git(repository, "diff", "--name-only", tag, "HEAD", "--", *sources_of(build.service, build.variant))


def sources_of(service: str, variant: str) -> list[str]:
    """Git pathspecs of everything that decides an image's content."""
    locks = ["uv", f"{service}-{variant}"] + ([f"program-{variant}"] if service in STAGES_WITH_PROGRAM else [])
    return [
        ":(glob)services/common/**/*.py",
        f":(glob)services/{service}/**/*.py",
        ":(exclude,glob)services/**/tests/**",
        f"services/{service}/Dockerfile",
        f"services/{service}/VERSION",
        "images/install.py",
        "images/without_cuda.py",
        "images/platforms.toml",
        *(f"lockfiles/{lock}.txt" for lock in locks),
    ]


def _digest(repository: Path, sources: list[str]) -> str:
    names = _git(repository, "ls-files", "--cached", "--others", "--exclude-standard", "--", *sources).splitlines()
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        path = repository / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"deleted") + b"\0")
    return digest.hexdigest()[:7]


def _git(repository: Path, *arguments: str) -> str:
    """Output of a git command; empty where this is no checkout or there is no git."""
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
