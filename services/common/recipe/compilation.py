"""The recipe's section `[compile]`: the compiler's flags and tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from services.common.recipe.section import COMPILED, TRAINED, Positive, Section

_FLAGS_OF_THE_STAGE = ("--framework", "--output", "-o", "--target")
_FLAGS_OF_THE_CACHE = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")


def _require_compiler_flag(flag: str) -> str:
    """Check that a text is one flag of neuronx-cc, passed as one argument without splitting or expansion."""
    name = flag.partition("=")[0]
    if not flag.startswith("-") or not flag.isprintable() or any(character.isspace() for character in flag):
        raise ValueError(f"{flag!r} is not a compiler flag; write name and value as one string, such as '--optlevel=2'")
    if name in _FLAGS_OF_THE_STAGE:
        raise ValueError(f"{name} is set by the compiler stage and cannot be a flag of the recipe")
    if name in _FLAGS_OF_THE_CACHE:
        raise ValueError(f"{name} is an option of libneuronxla and not of neuronx-cc; the stages manage the cache")
    return flag


CompilerFlag = Annotated[str, AfterValidator(_require_compiler_flag)]


class Compile(Section):
    enabled: Annotated[bool, TRAINED] = True
    require_warm: bool = False
    """End the trainer with exit code 4 as soon as a graph is not in the cache, instead of compiling the graph."""
    trace_on: Literal["device", "cpu"] = "device"
    """Machine on which Neuron graphs are traced: a node with the device, or any CPU, if both give the same graphs."""
    flags: Annotated[tuple[CompilerFlag, ...], Field(strict=False), COMPILED] = ()
    """Flags of neuronx-cc in their order, such as "--model-type=transformer"; the stage sets its target."""
    num_workers: Positive = 7
    """Number of Neuron graphs that are compiled at the same time, one a task; by default as many as a run has."""
    task_cpus: Annotated[int, Field(ge=1, le=1024)] = 8
    """CPUs that Ray reserves for a compile task."""
    task_memory_gib: Annotated[float, Field(gt=0, le=16_384)] = 32.0
    """GiB of memory that Ray reserves for a compile task. A task that was killed for memory gets twice as much."""
    task_timeout_seconds: Annotated[float, Field(gt=0)] = 7_200.0
    """Seconds after which a compile task is ended and its graph has failed. Large graphs were seen to take an hour."""
    task_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    """Most tasks for one graph. A task that was killed, was lost or ended with 70 is followed by another."""
