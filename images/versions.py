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
from services.common.errors import DeviceError

# What the head's image has besides its service and the contracts.
CONTROLLER_FOLDERS = ("deploy", "k8s/objects", "k8s/controller", "k8s/deploy")


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
    """The build that the working tree would make now.

    Raises `DeviceError` when git does not answer, or has too little history to know the commit.
    """
    version = (repository / "services" / service / "VERSION").read_text(encoding="utf-8").strip()
    if not (repository / ".git").exists():
        return Build(service, variant, version, "unknown", "")
    require_full_history(repository)
    sources = sources_of(service, variant)
    commit = git(repository, "log", "-1", "--format=%H", "--", *sources)
    is_changed = bool(git(repository, "status", "--porcelain", "--", *sources)) or not commit
    return Build(service, variant, version, commit or "unknown", _digest(repository, sources) if is_changed else "")


def require_full_history(repository: Path) -> None:
    """Raises `DeviceError` in a shallow clone: neither a service's last commit nor its last release can be known."""
    if git(repository, "rev-parse", "--is-shallow-repository") == "true":
        raise DeviceError(
            f"{repository} is a shallow clone, in which the last commit to a service and its last release cannot be "
            f"known: git fetch --unshallow --tags"
        )


def is_released(build: Build, repository: Path = REPOSITORY) -> bool:
    """Are the image's sources those of the tag that released this version?"""
    tag = f"{build.service}-v{build.version}"
    if build.change or build.commit == "unknown" or not git(repository, "tag", "--list", tag):
        return False
    return not git(repository, "diff", "--name-only", tag, "HEAD", "--", *sources_of(build.service, build.variant))


def sources_of(service: str, variant: str) -> list[str]:
    """Git pathspecs of everything that decides an image's content."""
    has_program = service in STAGES_WITH_PROGRAM
    locks = ["uv", f"{service}-{variant}"] + ([f"program-{variant}"] if has_program else [])
    controller = [f":(glob){folder}/*.py" for folder in CONTROLLER_FOLDERS] if service == "head" else []
    return [
        ":(glob)services/common/**/*.py",
        f":(glob)services/{service}/**/*.py",
        ":(exclude,glob)services/common/testing/**",
        ":(exclude,glob)services/**/tests/**",
        "infra/shapes.json",
        f"services/{service}/Dockerfile",
        f"services/{service}/VERSION",
        "images/install.py",
        "images/without_cuda.py",
        "images/make_user.sh",
        *(["images/install_toolchain.sh"] if has_program else []),
        "images/platforms.toml",
        ".dockerignore",
        *controller,
        *(f"lockfiles/{lock}.txt" for lock in locks),
    ]


def _digest(repository: Path, sources: list[str]) -> str:
    names = git(repository, "ls-files", "--cached", "--others", "--exclude-standard", "--", *sources).splitlines()
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        path = repository / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"deleted") + b"\0")
    return digest.hexdigest()[:7]


def git(repository: Path, *arguments: str) -> str:
    """Output of a git command. Raises `DeviceError` with git's words when it fails, and when there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DeviceError("no git on PATH, and an image's tag is made of a commit. Install git.") from error
    if done.returncode != 0:
        raise DeviceError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()
