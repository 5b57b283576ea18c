"""Golden manifests load as they were written, and what is written today has exactly their structure.

When a test here fails after a change of a schema: give the schema its next number, and replace its golden manifest by
one of that number. Never edit a golden manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.__main__ import MANIFEST_TYPES, read_manifest
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import ArtifactError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.file import load_recipe
from services.common.testing.artifacts import fill, publish, publish_checkpoint
from services.common.testing.recipes import write_recipe
from services.tokenizer.__main__ import main as tokenizer

GOLDEN = Path(__file__).parent / "manifests"
# Their keys are the recipe's and the compiler's; the schema does not fix them.
FREE = {"recipe", "facts"}


def write_corpus(root: Path, recipe: Path) -> None:
    texts = root.parent / "texts"
    texts.mkdir()
    for number in range(40):
        words = " ".join(f"sentence {line} of text {number} has {line * number} words" for line in range(12))
        (texts / f"{number}.txt").write_text(words, encoding="utf-8")
    write_recipe(recipe.parent, corpus__sources=[{"uri": str(texts)}])
    command = ["--recipe", str(recipe), "--root", str(root), "--launch", "inline"]
    assert exit_code_of(lambda: tokenizer(command)) == 0


def write_compile_cache(root: Path, recipe: Path) -> None:
    def build(workspace: Workspace) -> Draft:
        golden = read_golden("compile_cache-1", root.parent)
        return Draft(fill(workspace).payload.model_copy(update={"phases": golden.compile_cache.phases}))

    publish(root, load_recipe(recipe), build=build)


def write_checkpoint(root: Path, recipe: Path) -> None:
    inputs = read_golden("checkpoint-4", root.parent).inputs
    publish_checkpoint(root, load_recipe(recipe), step=1, waivers=("--flag",), inputs=inputs)


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "corpus-5": write_corpus,
    "compile_cache-1": write_compile_cache,
    "checkpoint-4": write_checkpoint,
}


def read_golden(name: str, folder: Path) -> Any:
    (folder / MANIFEST).write_bytes((GOLDEN / f"{name}.json").read_bytes())
    return read_manifest(folder)


def structure(value: Any, key: str = "") -> Any:
    """Keys and types of a JSON value. A list has the structure of its elements, which is the same for all."""
    if isinstance(value, dict):
        return {name: structure(each, name) for name, each in value.items()} if key not in FREE else "free"
    if isinstance(value, list):
        found = [structure(each) for each in value]
        assert all(each == found[0] for each in found)
        return found[:1]
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("name", WRITERS)
def test_a_golden_manifest_loads_and_is_written_again_with_the_same_bytes(tmp_path: Path, name: str) -> None:
    manifest = read_golden(name, tmp_path)

    assert manifest.schema_id == name.replace("-", "/")
    assert manifest.files
    manifest.write(tmp_path)
    content = (GOLDEN / f"{name}.json").read_bytes()
    assert (tmp_path / MANIFEST).read_bytes() == content
    (tmp_path / MANIFEST).write_bytes(content.replace(b'"service": "', b'"service": "un'))
    with pytest.raises(ArtifactError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", WRITERS)
def test_todays_manifests_have_the_structure_of_the_golden_ones(tmp_path: Path, name: str) -> None:
    root, recipe = tmp_path / "fsx", write_recipe(tmp_path)
    WRITERS[name](root, recipe)

    (written,) = root.glob(f"*/*/*/{MANIFEST}")

    golden = json.loads((GOLDEN / f"{name}.json").read_bytes())
    assert structure(json.loads(written.read_bytes())) == structure(golden)


def test_every_schema_has_a_golden_manifest_and_a_writer_here() -> None:
    current = {each.SCHEMA.replace("/", "-") for each in MANIFEST_TYPES.values()}

    assert current == set(WRITERS) == {path.stem for path in GOLDEN.glob("*.json")}
