"""Links lead to pages and headings that exist, paths to files of the repository, and recipe snippets are legal."""

from __future__ import annotations

import fnmatch
import re
import struct
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from docs.site.picture import MAX_BYTES, take_picture
from images.platforms import REPOSITORY
from services.common.artifacts.__main__ import MANIFEST_TYPES
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.common.testing.browser import find_browser
from tests.architecture.documents import Document, list_files, read_documents

DOCUMENTS, MODULES = read_documents(), list_files("*.py")
TOP = ("services", "deploy", "k8s", "infra", "images", "tests", "benchmarks", "recipes", "docs", "lockfiles")
_PATH = re.compile(rf"(?<![\w./$-])(?:\.\./)*(?:{'|'.join(TOP)})/[\w./*-]*")
_MODULE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)`")
MADE_BY_READERS = ("k8s/overlays/mine",)
"""Folders that a page tells its reader to make."""
MADE_BY_COMMANDS = [
    line.removeprefix("/") for line in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines() if line
]


def test_no_document_has_control_characters() -> None:
    """One NUL makes `grep` take a page for a binary file."""
    assert [each.name for each in DOCUMENTS if re.search(r"[\x00-\x08\x0b-\x1f]", each.text)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_a_document_names_exists(document: Document) -> None:
    """Links, paths that begin with a folder of the repository, and modules without their folder, such as `loop.py`."""
    assert [link for link in document.links() if not leads_somewhere(document, link)] == []
    paths = {path for line in document.code_lines() for path in _PATH.findall(line)}
    assert [path for path in paths if not exists_or_is_made(path)] == []
    modules = set(_MODULE.findall(document.text))
    assert [name for name in modules if not any(f"/{path}".endswith(f"/{name}") for path in MODULES)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_schemas_that_are_named_are_those_of_the_code(document: Document) -> None:
    schemas = {each.SCHEMA for each in MANIFEST_TYPES.values()}
    assert set(re.findall(r"\b(?:corpus|compile_cache|checkpoint)/\d+\b", document.text)) <= schemas


def test_the_architecture_page_names_every_room() -> None:
    """Folders with Python code, down to those of the services' rooms."""
    text = Document("docs/architecture.md").text
    room = re.compile(r"((?:services/(?:common|trainer)|deploy|k8s|infra)/(?!tests|testing|userdata)\w+)/\w+\.py")
    rooms = {found[1] for name in MODULES if (found := room.fullmatch(name))}
    assert sorted(each for each in rooms if f"{each}/" not in text and f"{each}`" not in text) == []


def list_snippets() -> list[str]:
    pages = [REPOSITORY / "docs/operations" / page for page in ("branches.md", "runbooks/run-diverges.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", list_snippets())
def test_a_snippet_makes_a_branch_of_the_demo(snippet: str) -> None:
    demo = load_recipe(REPOSITORY / "recipes/tiny-cpu.toml")
    values: dict[str, Any] = demo.model_dump(mode="json")
    for section, changed in tomllib.loads(snippet).items():
        values[section] = changed if section == "tokenizer" else values[section] | changed

    branch = Recipe.model_validate(values).train.branch

    assert branch
    assert branch.run.startswith(f"{demo.name}-")


def test_five_keys_of_the_readme_make_a_qwen3_of_ones_own_text_from_the_demo() -> None:
    [changed] = re.findall(r"^```toml\n(.*?)^```", Document("README.md").text, re.MULTILINE | re.DOTALL)
    demo = load_recipe(REPOSITORY / "recipes/tiny-cpu.toml").model_dump(mode="json")
    given = tomllib.loads(changed)
    values = {key: demo[key] | each if isinstance(each, dict) else each for key, each in given.items()}
    recipe = Recipe.model_validate(demo | values)
    assert recipe.model.qk_norm
    assert 1_800_000 < recipe.model.num_parameters < 2_200_000
    own = recipe.model_dump(mode="json")
    assert [own["name"] == demo["name"], own["corpus"]["name"] == demo["corpus"]["name"]] == [False, False]
    kept = {key: {**own[key], **{name: demo[key][name] for name in given[key]}} for key in ("corpus", "model")}
    assert own | kept | {"name": demo["name"]} == demo


def test_the_blueprints_road_changes_the_place_of_the_tokenizer_alone(tmp_path: Path) -> None:
    lines = [line for block in Document("docs/from-the-blueprint.md").command_blocks() for line in block.lines]
    [edit] = [line for line in lines if line.startswith("sed ")]
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    subprocess.run(["bash", "-c", edit], cwd=tmp_path, check=True)
    [made] = tmp_path.glob("*.toml")
    assert any(f"RECIPE={made.name} " in line for line in lines)
    before, after = (load_recipe(path) for path in (REPOSITORY / edit.split()[2], made))
    model = after.tokenizer.model
    assert model == "hf://NousResearch/Llama-2-7b-hf/tokenizer.model"
    tokenizer = before.tokenizer.model_copy(update={"model": model})
    assert after == before.model_copy(update={"tokenizer": tokenizer})


def leads_somewhere(document: Document, link: str) -> bool:
    """Does the link lead to a file or folder, and its anchor to a heading? Links to other sites are not followed."""
    path, _, anchor = link.partition("#")
    if "://" in path:
        return True
    target = document.path.parent / path if path else document.path
    return target.exists() and (not anchor or anchor in Document(str(target)).anchors())


def exists_or_is_made(path: str) -> bool:
    path = re.sub(r"^(\.\./)+", "", path).rstrip(".")
    if "*" in path:
        return any(REPOSITORY.glob(path.rstrip("/")))
    is_made = path in MADE_BY_READERS or any(fnmatch.fnmatch(path, f"*{made}") for made in MADE_BY_COMMANDS)
    return is_made or (REPOSITORY / path).exists()


def test_the_picture_of_the_readme_is_small() -> None:
    assert 10_000 < (REPOSITORY / "docs/report.png").stat().st_size < MAX_BYTES


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")
def test_a_picture_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<h1>a page</h1>")
    picture = take_picture(page, width=640, height=480)
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (640, 480)
