"""Defines what all sections of a recipe have in common: strict types, bounds, and marks of fields that decide ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

Kind = Literal["corpus", "compile_cache", "checkpoint"]
Positive = Annotated[int, Field(gt=0)]
MAX_NAME_LENGTH = 128
"""Longest name of a run or corpus. File systems take 255 bytes, and stages add hashes, endings and tokens to a name."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=MAX_NAME_LENGTH)]

_SIGNATURES = frozenset({"signature", "sig", "x-amz-signature", "x-goog-signature", "token", "access_token", "key"})
"""Parameters whose address is a password."""


@dataclass(frozen=True)
class Identity:
    """Marks a recipe field that decides the bytes of artifacts of these kinds."""

    kinds: tuple[Kind, ...]
    is_default_left_out: bool = False
    """Whether the field's default value is no part of an id, because it gives the bytes of a recipe without the field.
    Artifacts keep their ids when such a field is added."""
    like_default: tuple[Any, ...] = ()
    """Further values that give the bytes of the default."""


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
    )

    @field_validator("*")
    @classmethod
    def _has_no_password(cls, value: Any) -> Any:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str):
                require_no_password(each)
        return value


def require_no_password(address: str) -> None:
    """Raise `ValueError` for `user:password@` and for a signed address: a recipe is stored with all that it makes."""
    if "://" not in address:
        return
    parts = urlsplit(address)
    if parts.password or _SIGNATURES & {name.lower() for name, _ in parse_qsl(parts.query)}:
        raise ValueError(
            "an address with a password or a signature, and a recipe is stored and shown. Libraries find credentials "
            "in ~/.netrc, HF_TOKEN and AWS's chain; download a file with a signed address first"
        )
