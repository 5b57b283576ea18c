"""Tells of a run's end, of a loss that diverges and of lost workers, by the recipe's webhook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.artifacts.upstream import stage_command
from services.common.notices import notifying
from services.common.recipe.schema import NoticeCondition
from services.trainer.job import Job

NOTICED_EVENTS: dict[str, NoticeCondition] = {
    "restart": "workers_lost",
    "rollbacks_exhausted": "diverged",
    "loss_deviates_at_end": "diverged",
    "diverged": "diverged",
}
"""Conditions by the kind of the run's event."""

_NOT_TOLD = ("event", "time", "attempt", "start")


@contextmanager
def notifying_run(job: Job, recipe_path: Path) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """Yield the observer of the run's new events, and tell that the run is done or has failed at the block's end."""
    subject = f"trainer {job.run}"
    with notifying(job.recipe.notify, subject, stage_command("trainer", recipe_path, job.root, "summary")) as post:

        def observe(events: list[dict[str, Any]]) -> None:
            for event in events:
                if condition := NOTICED_EVENTS.get(event["event"]):
                    facts = (f"{name} {value}" for name, value in event.items() if name not in _NOT_TOLD)
                    post(condition, ", ".join(facts))

        yield observe
        post("done", f"trained to step {job.recipe.train.max_steps:,}")
