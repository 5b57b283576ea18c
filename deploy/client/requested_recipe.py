"""The recipe of a deploy command: parsed once, then passed on with the stage's options."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from deploy.client.outline import Outline
from deploy.stage_contract import DEGREE
from services.common.errors import RecipeError
from services.common.recipe.file import (
    RecipeSource,
    parse_recipe_source,
    read_override,
    read_overrides,
    read_recipe_source,
)
from services.common.recipe.schema import Stage

TOKENIZER_NODES = "--cluster.tokenizer_nodes"


@dataclass(frozen=True)
class RequestedRecipe:
    """A recipe, and the options with which a stage runs it."""

    source: RecipeSource
    arguments: tuple[str, ...] = ()
    """Options of the stage's command. Those that read `--section.key=value` override the recipe."""

    @property
    def text(self) -> str:
        return self.source.text

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def outline(self) -> Outline:
        """The values that the client needs, overrides included.

        Raises `RecipeError` for a recipe from which the nodes of a stage cannot be read.
        """
        try:
            return Outline.model_validate(self.source.values(read_overrides(self.arguments)), extra="ignore")
        except ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}, got {each['input']!r}" for each in error.errors()
            ]
            raise RecipeError(
                f"{self.source.origin}: the nodes of a stage cannot be read from this recipe: {'; '.join(wrong)}"
            ) from error

    def with_arguments(self, *arguments: str) -> RequestedRecipe:
        """The recipe with further options, which win over earlier ones."""
        return replace(self, arguments=(*self.arguments, *arguments))

    def on_nodes(self, stage: Stage, nodes: int | None) -> RequestedRecipe:
        """The recipe with the option that NODES sets; itself where that is None or the recipe's own number.

        The tokenizer's NODES are its own. The compiler's are the trainer's, whose graphs it compiles. Raises
        `RecipeError` where the trainer's workers would not form whole models.
        """
        if nodes is None or nodes == self.outline.nodes_of("tokenizer" if stage == "tokenizer" else "trainer"):
            return self
        if stage == "tokenizer":
            return self.with_arguments(f"{TOKENIZER_NODES}={nodes}")
        return self.with_arguments(f"{DEGREE}={self.outline.data_parallel_size_on(nodes)}")

    def with_overrides_only(self) -> RequestedRecipe:
        """The recipe with only those options that override it: subcommands take no others."""
        return replace(self, arguments=tuple(each for each in self.arguments if read_override(each)))

    def require_known(self) -> None:
        """Raise `RecipeError` for a key or a value that this checkout's stages do not take."""
        self.source.validate(read_overrides(self.arguments))

    def describe(self) -> str:
        changed = f", with {' '.join(self.arguments)}" if self.arguments else ""
        return f"{self.outline.name}, {self.source.origin}{changed}"


def read_requested_recipe(path: Path) -> RequestedRecipe:
    """The recipe of a file. Raises `RecipeError` for a file that cannot be read and for one that is no TOML."""
    return RequestedRecipe(read_recipe_source(path))


def parse_requested_recipe(text: str, origin: str) -> RequestedRecipe:
    """The recipe of an earlier deployment; `origin` names that deployment. Raises `RecipeError`."""
    return RequestedRecipe(parse_recipe_source(text.encode(), origin))
