"""Builds a small git repository that has every service."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from images.platforms import REPOSITORY, SERVICES

CHANGELOG = "# Changelog\n\n## [Unreleased]\n### Fixed\n- A thing that users see.\n\n## [0.1.0]\n### Added\n- All.\n"


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def make_checkout(folder: Path) -> Path:
    """A committed repository with every service and the real Dockerfiles."""
    repository = folder / "checkout"
    shutil.copytree(REPOSITORY / "images", repository / "images", ignore=shutil.ignore_patterns("__pycache__", "*.crt"))
    write(repository / "services/common/errors.py", "print('one')\n")
    for service in SERVICES:
        write(repository / "services" / service / "VERSION", "0.1.0\n")
        write(repository / "services" / service / "CHANGELOG.md", CHANGELOG)
        write(repository / "services" / service / "work.py", "print('one')\n")
    begin(repository)
    return repository


def begin(repository: Path) -> None:
    """Make a git repository of a folder, with one commit."""
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "config", "user.name", "someone")
    git(repository, "config", "user.email", "someone@example.com")
    commit(repository, "Begin")


def commit(repository: Path, message: str) -> None:
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", message)
