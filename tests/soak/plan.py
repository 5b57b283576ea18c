"""Plans the cycles of a soak: everything that a cycle does follows from the soak's seed and the cycle's number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from services.common.recipe.schema import STAGES, Stage

Kind = Literal[
    "kill a worker",
    "kill another process of the command",
    "kill the command",
    "kill everything at once",
    "freeze a worker",
    "SIGTERM",
    "SIGINT",
    "fill the root's disk",
    "fill the scratch disk",
    "suspend the root's disk",
    "flip a bit of the newest checkpoint",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_PLACE: tuple[Kind, ...] = ("kill a worker", "freeze a worker", "suspend the root's disk")
"""Faults that the command outlives. A long cycle has these alone, so that one driver lives through all of them."""

Moment = Literal["start", "step", "save"]

SHORT_STEPS, LONG_STEPS = 80, 240
LONG_EVERY, RAY_EVERY = 6, 5


@dataclass(frozen=True)
class Fault:
    """A fault, and the moment at which a stage's command meets it."""

    kind: Kind
    stage: Stage
    moment: Moment
    """`start`: some seconds after a start of the command. `step`: at a step of training. `save`: in a checkpoint."""
    start: int = 0
    """Earliest start of the command, from 0, that meets the fault."""
    after_seconds: float = 0.0
    """Seconds after the command's start, for the moment `start`."""
    step: int = 0
    """Step from which on the fault is due, for the moments `step` and `save`."""
    seconds: float = 0.0
    """Seconds for which the fault lasts; 0 for a kill or a signal."""
    choice: float = 0.0
    """Number in [0, 1) that chooses the process or the file among the possible ones."""


@dataclass(frozen=True)
class Cycle:
    """A pipeline from text to a trained model, and its faults."""

    number: int
    max_steps: int
    launch: Literal["inline", "ray"]
    workers: tuple[int, ...]
    """Data-parallel degree of each start of the trainer; the last one holds for all later starts."""
    zero_stages: tuple[int, ...]
    has_corpus: bool
    """Whether the root begins with the undisturbed run's corpus; the tokenizer is left out then."""
    has_cache: bool
    """Whether the root begins with the undisturbed run's compile cache; the compiler is left out then."""
    faults: tuple[Fault, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages that have something to do, in their order."""
        left_out = {"tokenizer": self.has_corpus, "compiler": self.has_cache, "trainer": False}
        return tuple(stage for stage in STAGES if not left_out[stage])

    def faults_of(self, stage: Stage) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.stage == stage)


def plan_cycle(seed: int, number: int) -> Cycle:
    """Return the cycle with this number of the soak with this seed."""
    chance = random.Random(f"{seed} {number}")
    is_long = number % LONG_EVERY == LONG_EVERY - 1
    max_steps = LONG_STEPS if is_long else SHORT_STEPS
    has_corpus, has_cache = chance.random() < 0.6, chance.random() < 0.9
    launch: Literal["inline", "ray"] = "ray" if number % RAY_EVERY == RAY_EVERY - 2 and not is_long else "inline"
    kinds = IN_PLACE if is_long else KINDS
    faults = [
        *_plan_training(chance, kinds, max_steps, count=8 if is_long else chance.randint(2, 4)),
        *([] if has_corpus else _plan_start(chance, kinds, "tokenizer")),
        *([] if has_cache else _plan_start(chance, kinds, "compiler")),
    ]
    return Cycle(
        number=number,
        max_steps=max_steps,
        launch=launch,
        workers=tuple(chance.choice((1, 2, 2, 4)) for _ in range(6)),
        zero_stages=tuple(chance.choice((0, 1)) for _ in range(6)),
        has_corpus=has_corpus,
        has_cache=has_cache,
        faults=tuple(faults),
    )


def _plan_training(chance: random.Random, kinds: Sequence[Kind], max_steps: int, count: int) -> list[Fault]:
    moments: tuple[Moment, ...] = ("start", "step", "step", "step", "save")
    faults = []
    for number in range(count):
        kind, moment = chance.choice(kinds), chance.choice(moments)
        if kind == "flip a bit of the newest checkpoint":
            moment = "step"
        faults.append(
            _draw(chance, kind, "trainer", moment, start=min(number, 2), step=chance.randint(1, int(max_steps * 0.95)))
        )
    return sorted(faults, key=lambda fault: (fault.moment != "start", fault.step))


def _plan_start(chance: random.Random, kinds: Sequence[Kind], stage: Stage) -> list[Fault]:
    usable = [kind for kind in kinds if kind != "flip a bit of the newest checkpoint"]
    return [_draw(chance, chance.choice(usable), stage, "start", start=start) for start in range(chance.randint(1, 2))]


def _draw(chance: random.Random, kind: Kind, stage: Stage, moment: Moment, start: int = 0, step: int = 0) -> Fault:
    lasting = {"fill": (4.0, 10.0), "suspend": (1.0, 9.0), "freeze": (1.0, 12.0)}
    bounds = lasting.get(kind.split()[0], (0.0, 0.0))
    longest_seconds = {"tokenizer": 12.0, "compiler": 40.0, "trainer": 20.0}[stage]
    return Fault(
        kind=kind,
        stage=stage,
        moment=moment,
        start=start,
        after_seconds=round(chance.uniform(0.2, longest_seconds), 2),
        step=step,
        seconds=round(chance.uniform(*bounds), 2),
        choice=round(chance.random(), 6),
    )
