"""The recipe snippets of the documents are legal: each changes the recipe of the demo into another that loads."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from tests.architecture.imports import REPOSITORY

PAGES = ("branches.md", "runbooks/run-diverges.md")
TEXT = "".join((REPOSITORY / "docs/operations" / page).read_text(encoding="utf-8") for page in PAGES)
SNIPPETS = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_makes_a_branch_of_the_demo(snippet: str) -> None:
    demo = load_recipe(REPOSITORY / "recipes/tiny-cpu.toml")
    values: dict[str, Any] = demo.model_dump(mode="json")
    for section, changed in tomllib.loads(snippet).items():
        values[section] = changed if section == "tokenizer" else values[section] | changed

    branch = Recipe.model_validate(values).train.branch

    assert branch
    assert branch.run.startswith(f"{demo.name}-")
