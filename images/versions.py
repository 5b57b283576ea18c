"""Derives an image's tags from the service's version and from the last commit that changed the image's sources.

A commit that changes the trainer alone therefore gives the tokenizer's image no new tag.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from images.platforms import REPOSITORY, dockerfile_of
from services.common.errors import DeviceError

# What .dockerignore keeps from the folders that a Dockerfile copies.
NOT_IN_IMAGES = (
    ":(exclude)services/common/testing",
    *(f":(exclude,glob)services/**/{each}" for each in ("tests/**", "*.md", "BUILD", "requirements.txt")),
)


@dataclass(frozen=True)
class Build:
    """Identifies the image of one service and variant that one state of the sources gives."""

    service: str
    variant: str
    version: str
    commit: str
    """Full id of the commit; `unknown` outside of a git checkout."""
    change: str
    """Hash of the image's sources when they differ from the commit; empty when they do not."""

    @property
    def is_committed(self) -> bool:
        return not self.change and self.commit != "unknown"

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
    """Describe the image that a build of the working tree would make now.

    Raises `DeviceError` when git fails, and in a shallow clone, whose history is too short to contain the commit.
    """
    version = (repository / "services" / service / "VERSION").read_text(encoding="utf-8").strip()
    if not (repository / ".git").exists():
        return Build(service, variant, version, "unknown", "")
    require_full_history(repository)
    sources = sources_of(service, variant, repository)
    commit = git(repository, "log", "-1", "--format=%H", "--", *sources)
    is_changed = bool(git(repository, "status", "--porcelain", "--", *sources)) or not commit
    return Build(service, variant, version, commit or "unknown", _digest(repository, sources) if is_changed else "")


def require_full_history(repository: Path) -> None:
    """Raises `DeviceError` in a shallow clone, which may lack a service's last commit and its last release."""
    if git(repository, "rev-parse", "--is-shallow-repository") == "true":
        raise DeviceError(
            f"{repository} is a shallow clone, and a tag is made from the last commit that changed a service, which "
            f"the clone may lack. Fetch the whole history: git fetch --unshallow --tags"
        )


def is_released(build: Build, repository: Path = REPOSITORY) -> bool:
    """Return whether the image's sources equal those of the git tag that released this version."""
    tag = f"{build.service}-v{build.version}"
    if not build.is_committed or not git(repository, "tag", "--list", tag):
        return False
    sources = sources_of(build.service, build.variant, repository)
    return not git(repository, "diff", "--name-only", tag, "HEAD", "--", *sources)


def sources_of(service: str, variant: str, repository: Path = REPOSITORY) -> list[str]:
    """Git pathspecs of the files that an image is made from: its Dockerfile, all that this copies, and the pins."""
    dockerfile = dockerfile_of(service)
    text = (repository / dockerfile).read_text(encoding="utf-8")
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.MULTILINE))
    paths = copied.replace("${SERVICE}", service).replace("${VARIANT}", variant).split()
    return [f":(glob){path}" for path in (dockerfile, "images/platforms.toml", ".dockerignore", *paths)] + [
        *NOT_IN_IMAGES
    ]


def _digest(repository: Path, sources: list[str]) -> str:
    names = git(repository, "ls-files", "--cached", "--others", "--exclude-standard", "--", *sources).splitlines()
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        path = repository / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"deleted") + b"\0")
    return digest.hexdigest()[:7]


def git(repository: Path, *arguments: str) -> str:
    """Output of a git command. Raises `DeviceError` with git's message when it fails."""
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()
