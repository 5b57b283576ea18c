"""The environment variables of this process that decide graphs, for the facts of a program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from services.common.errors import DeviceError


def variables_of(
    environment: Mapping[str, str], prefixes: tuple[str, ...], without: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables whose names begin with one of the prefixes, sorted by name, except those in `without`."""
    return {
        name: value for name, value in sorted(environment.items()) if name.startswith(prefixes) and name not in without
    }


def require_compilation(environment: Mapping[str, str]) -> None:
    """Raise `DeviceError` where a variable lets `torch.compile` return functions as they are."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if environment.get(name) == "1":
            raise DeviceError(
                f"{name}=1 is set, so torch compiles nothing, and the recipe has compile.enabled. Unset the variable "
                f"(unset {name}), or run without compiled graphs: --compile.enabled=false"
            )


def require_flags(environment: Mapping[str, str], variable: str, flags: Sequence[str]) -> None:
    """Raise `DeviceError` where the environment's compiler flags are not those that a recipe gives."""
    expected = " ".join(flags)
    if environment.get(variable, expected) != expected:
        raise DeviceError(
            f"{variable}={environment[variable]!r} is set, and the recipe's flags are {expected!r}. Set flags in the "
            f"recipe (compile.flags), and unset the variable: unset {variable}"
        )
