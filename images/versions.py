"""Derives an image's tags from the service's version and from the last commit that changed the image's sources.

A commit that changes the trainer alone therefore gives the tokenizer's image no new tag.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from images.platforms import REPOSITORY, STAGES_WITH_PROGRAM, dockerfile_of, locks_of
from services.common.errors import DeviceError

# Code that the head's image contains besides services/common and services/head.
CONTROLLER_FOLDERS = ("deploy", "k8s/objects", "k8s/controller")
# What the build of an image with the program reads besides the files that every image's build reads.
OF_PROGRAM = tuple(
    f"images/{name}" for name in ("install_toolchain.sh", "prepare_base.sh", "torch-neuron.txt", "neuron-runtime.txt")
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
    sources = sources_of(service, variant)
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
    if build.change or build.commit == "unknown" or not git(repository, "tag", "--list", tag):
        return False
    return not git(repository, "diff", "--name-only", tag, "HEAD", "--", *sources_of(build.service, build.variant))


def sources_of(service: str, variant: str) -> list[str]:
    """Git pathspecs of all files that an image's content depends on."""
    controller = [f":(glob){folder}/*.py" for folder in CONTROLLER_FOLDERS] if service == "head" else []
    page = [":(glob)services/trainer/report/**"] if service == "trainer" else []
    return [
        ":(glob)services/common/**/*.py",
        f":(glob)services/{service}/**/*.py",
        *page,
        ":(exclude,glob)services/common/testing/**",
        ":(exclude,glob)services/**/tests/**",
        "infra/shapes.json",
        dockerfile_of(service),
        f"services/{service}/VERSION",
        "images/install.py",
        "images/without_cuda.py",
        "images/make_user.sh",
        *(OF_PROGRAM if service in STAGES_WITH_PROGRAM else ()),
        "images/platforms.toml",
        ".dockerignore",
        *controller,
        *(f"lockfiles/{lock}.txt" for lock in ["uv", *locks_of(service, variant)]),
    ]


def _digest(repository: Path, sources: list[str]) -> str:
    names = git(repository, "ls-files", "--cached", "--others", "--exclude-standard", "--", *sources).splitlines()
    digest = hashlib.sha256()
    for name in sorted(set(names)):
        path = repository / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"deleted") + b"\0")
    return digest.hexdigest()[:7]


def git(repository: Path, *arguments: str) -> str:
    """Output of a git command. Raises `DeviceError` with git's message when it fails, and when git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DeviceError("git is not on PATH, and an image's tag contains the id of a commit. Install git.") from error
    if done.returncode != 0:
        raise DeviceError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()
