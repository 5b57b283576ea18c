"""Links, paths and make targets in the documents exist."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.architecture.imports import REPOSITORY

_LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    check=False,  # a copy of the sources has no git
).stdout.split()
DOCUMENTS = [name for name in _LISTED if "CHANGELOG" not in name]
MADE_BY_COMMANDS = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = REPOSITORY / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_that_are_named_exist(name: str) -> None:
    """Checks paths in backticks that start with a top-level folder; ignored files are made by commands."""
    named = re.findall(
        r"`((?:services|tests|k8s|images|infra|docs|benchmarks|recipes|deploy)/[\w./-]*)`",
        (REPOSITORY / name).read_text(encoding="utf-8"),
    )
    missing = [path for path in named if not (REPOSITORY / path).exists()]
    assert [path for path in missing if f"/{path}" not in MADE_BY_COMMANDS] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_that_are_named_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"`make ([a-z][\w-]*)", (REPOSITORY / name).read_text(encoding="utf-8"))
    assert sorted(set(named) - targets) == []
