"""Links lead to pages and headings that exist, and paths that a document names to files of the repository."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from functools import cache

import pytest

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from tests.architecture.documents import Document, read_documents
from tests.architecture.imports import REPOSITORY

DOCUMENTS = read_documents()
TOP = ("services", "deploy", "k8s", "infra", "images", "tests", "benchmarks", "recipes", "docs", "lockfiles")
_PATH = re.compile(rf"(?<![\w./$-])(?:\.\./)*(?:{'|'.join(TOP)})/[\w./*-]*")
_MODULE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)`")
MADE_BY_READERS = ("k8s/overlays/mine",)
"""Folders that a page tells its reader to make."""
MADE_BY_COMMANDS = [
    line.removeprefix("/") for line in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines() if line
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_pages_and_headings(document: Document) -> None:
    assert [link for link in document.links() if not leads_somewhere(document, link)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_paths_in_code_exist(document: Document) -> None:
    """Paths that begin with a folder of the repository, in code blocks and in sentences. Commands make those that
    git ignores.
    """
    assert missing_paths(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_modules_that_are_named_exist(document: Document) -> None:
    """A module without its folder, such as `loop.py`, is one of the repository's modules."""
    assert missing_modules(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_schemas_that_are_named_are_those_of_the_code(document: Document) -> None:
    schemas = {CorpusManifest.SCHEMA, CompileCacheManifest.SCHEMA, CheckpointManifest.SCHEMA}
    assert set(re.findall(r"\b(?:corpus|compile_cache|checkpoint)/\d+\b", document.text)) <= schemas


def test_the_architecture_page_names_every_room() -> None:
    """Folders with Python code, down to those of the services' rooms."""
    text = Document("docs/architecture.md").text
    rooms = {
        path.parent.relative_to(REPOSITORY).as_posix()
        for pattern in (
            "services/common/*/*.py",
            "services/trainer/*/*.py",
            "deploy/*/*.py",
            "k8s/*/*.py",
            "infra/*/*.py",
        )
        for path in REPOSITORY.glob(pattern)
        if path.parent.name not in ("tests", "testing", "userdata")
    }
    assert sorted(room for room in rooms if f"{room}/" not in text and f"{room}`" not in text) == []


def leads_somewhere(document: Document, link: str) -> bool:
    """Does the link lead to a file or folder, and its anchor to a heading? Links to other sites are not followed."""
    path, _, anchor = link.partition("#")
    if "://" in path:
        return True
    target = document.path.parent / path if path else document.path
    return target.exists() and (not anchor or anchor in Document(str(target)).anchors())


def missing_paths(document: Document) -> list[str]:
    named = {path for line in document.code_lines() for path in _PATH.findall(line)}
    return sorted(path for path in named if not exists_or_is_made(path))


def exists_or_is_made(path: str) -> bool:
    path = re.sub(r"^(\.\./)+", "", path).rstrip(".")
    if "*" in path:
        return any(REPOSITORY.glob(path.rstrip("/")))
    is_made = path in MADE_BY_READERS or any(fnmatch.fnmatch(path, f"*{made}") for made in MADE_BY_COMMANDS)
    return is_made or (REPOSITORY / path).exists()


def missing_modules(document: Document) -> list[str]:
    named = set(_MODULE.findall(document.text))
    return sorted(name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in tracked_modules()))


@cache
def tracked_modules() -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    return subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
