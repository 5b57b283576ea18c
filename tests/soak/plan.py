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
FLIP: Kind = "flip a bit of the newest checkpoint"
KILLS_OF_COMMAND: tuple[Kind, ...] = ("kill the command", "kill everything at once")
IN_PLACE: tuple[Kind, ...] = ("kill a worker", "freeze a worker", "suspend the root's disk")
"""Faults that the command outlives. A long cycle has these alone, so that one driver lives through all of them."""
_BOUNDS = {"fill": (4.0, 10.0), "suspend": (1.0, 9.0), "freeze": (1.0, 12.0)}
"""Seconds for which the faults last, by the first word of their kind."""
_LATEST_SECONDS = {"tokenizer": 12.0, "compiler": 40.0, "trainer": 20.0}

Moment = Literal["start", "step", "save"]

MAX_STEPS = 120
LONG_EVERY, RAY_EVERY = 6, 5


@dataclass(frozen=True)
class Fault:
    """A fault, and the moment at which a stage's command meets it."""

    kind: Kind
    stage: Stage
    moment: Moment
    """`start`: some seconds after a start of the command. `step`: at a step of training. `save`: in a checkpoint."""
    start: int
    """Earliest start of the command, from 0, that meets the fault."""
    after_seconds: float
    """Seconds after the command's start, for the moment `start`."""
    step: int
    """Step from which on the fault is due, for the moments `step` and `save`."""
    seconds: float
    """Seconds for which the fault lasts; 0 for a kill or a signal."""
    choice: float
    """Number in [0, 1) that chooses the process or the file among the possible ones."""


@dataclass(frozen=True)
class Cycle:
    """A pipeline from text to a trained model, and its faults."""

    number: int
    launch: Literal["inline", "ray"]
    layouts: tuple[tuple[int, int], ...]
    """Data-parallel degree and ZeRO stage of each start of the trainer; the last one holds for all later starts."""
    stages: tuple[Stage, ...]
    """Stages that run, in their order; the root begins with the undisturbed run's artifacts of the others."""
    faults: tuple[Fault, ...]


def plan_cycle(seed: int, number: int) -> Cycle:
    """Return the cycle with this number of the soak with this seed."""
    chance = random.Random(f"{seed} {number}")
    is_long = number % LONG_EVERY == LONG_EVERY - 1
    left_out = {"tokenizer": chance.random() < 0.6, "compiler": chance.random() < 0.9, "trainer": False}
    stages = tuple(stage for stage in STAGES if not left_out[stage])
    kinds = IN_PLACE if is_long else KINDS
    faults = _plan_training(chance, kinds, count=8 if is_long else chance.randint(2, 4))
    for stage in stages[:-1]:
        usable = [kind for kind in kinds if kind != FLIP]
        faults += [_draw(chance, chance.choice(usable), stage, "start", start) for start in range(chance.randint(1, 2))]
    return Cycle(
        number=number,
        launch="ray" if number % RAY_EVERY == RAY_EVERY - 2 and not is_long else "inline",
        layouts=tuple((chance.choice((1, 2, 2, 4)), chance.choice((0, 1))) for _ in range(6)),
        stages=stages,
        faults=tuple(faults),
    )


def _plan_training(chance: random.Random, kinds: Sequence[Kind], count: int) -> list[Fault]:
    moments: tuple[Moment, ...] = ("start", "step", "step", "step", "save")
    faults = []
    for number in range(count):
        kind, moment = chance.choice(kinds), chance.choice(moments)
        step = chance.randint(1, int(MAX_STEPS * 0.95))
        faults.append(_draw(chance, kind, "trainer", moment, min(number, 2), step))
    return sorted(faults, key=lambda fault: (fault.moment != "start", fault.step))


def _draw(chance: random.Random, kind: Kind, stage: Stage, moment: Moment, start: int, step: int = 0) -> Fault:
    return Fault(
        kind=kind,
        stage=stage,
        moment=moment,
        start=start,
        after_seconds=chance.uniform(0.2, _LATEST_SECONDS[stage]),
        step=step,
        seconds=chance.uniform(*_BOUNDS.get(kind.split()[0], (0.0, 0.0))),
        choice=chance.random(),
    )
