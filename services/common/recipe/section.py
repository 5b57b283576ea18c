"""Defines what all sections of a recipe have in common: strict types, bounds, and marks of fields that decide ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from services.common.input.credentials import require_no_credentials

Kind = Literal["corpus", "compile_cache", "checkpoint"]

MAX_ENTRIES = 10_000
"""Most entries of a list, such as the sources of a corpus; a folder or a glob is one entry. The errors of a million bad
entries would take gigabytes."""


@dataclass(frozen=True)
class Identity:
    """Marks a recipe field that decides the bytes of artifacts of these kinds."""

    kinds: tuple[Kind, ...]
    is_default_left_out: bool = False
    """Whether the field's default value is no part of an id, because it gives the bytes of a recipe without the field.
    Artifacts keep their ids when such a field is added."""


CORPUS = Identity(("corpus",))
CORPUS_UNLESS_DEFAULT = Identity(("corpus",), is_default_left_out=True)
TRACED = Identity(("compile_cache", "checkpoint"))  # a constant of the compiled graphs, and of the weights
TRAINED = Identity(("checkpoint",))
COMPILED = Identity(("compile_cache",))


class Section(BaseModel):
    """A section of a recipe: its fields have strict types and bounds, and unknown fields are refused."""

    model_config = ConfigDict(
        defer_build=True,  # a command uses few of its models, and starts 0.03 s earlier
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may hold a credential
    )

    @model_validator(mode="before")
    @classmethod
    def _has_short_lists(cls, fields: Any) -> Any:
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, (list, tuple)) and len(value) > MAX_ENTRIES:
                raise ValueError(f"{name}: {len(value):,} entries, expected at most {MAX_ENTRIES:,}")
        return fields

    @field_validator("*")
    @classmethod
    def _fits_the_machine(cls, value: Any) -> Any:
        """Refuse integers of more than 64 bits, which TOML does not have and floats cannot hold, text with a NUL, and
        credentials.
        """
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("an integer of more than 64 bits")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{value[:80]!r} has a NUL character, which no path and no name can have")
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str):
                require_no_credentials(each, "the value")
        return value
