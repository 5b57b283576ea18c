"""Turns the events of a run into notices to its operators, and raises those of a command's begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from services.common.artifacts.upstream import stage_command
from services.common.errors import NoRoomForWorkers, StorageError
from services.common.notices.outbox import OUTBOX_FILE
from services.common.notices.stage_notices import StageNotices, notifying
from services.common.process.entry_point import exit_code_for
from services.common.recipe.schema import NoticeCondition
from services.trainer.job import Job
from services.trainer.run import REPORT_FILE


class _EventNotice(NamedTuple):
    """The notice of an event, without what all notices of a run have in common."""

    condition: NoticeCondition
    key: str
    text: str
    page: str = ""


@contextmanager
def notifying_run(job: Job, recipe_path: Path, step: int) -> Iterator[RunNotices]:
    """Raise the notices of a command that trains a run from `step` on. The outbox is in the run's folder."""
    notices = StageNotices(
        job.run_folder / OUTBOX_FILE,
        job.recipe.notify,
        subject=f"trainer {job.run}",
        root=job.root,
        next_command=stage_command("trainer", recipe_path, job.root),
        report=str(job.run_folder / REPORT_FILE),
    )
    run = RunNotices(job, notices)
    with notifying(notices):
        run.start(step)
        try:
            yield run
        except BaseException as error:
            run.fail(error)
            raise
        run.finish(recipe_path)


class RunNotices:
    """The notices of one command that trains a run."""

    def __init__(self, job: Job, notices: StageNotices) -> None:
        self._job, self._notices = job, notices

    def start(self, step: int) -> None:
        """Raise the notice that the run has begun, which later commands of the run do not repeat."""
        last = self._job.recipe.train.max_steps
        self._notices.raise_notice("started", "", f"training from step {step:,} to {last:,}")

    def observe(self, events: list[dict[str, Any]]) -> None:
        """Raise the notices of new events."""
        for event in events:
            if found := notice_of(event):
                self._notices.raise_notice(*found)

    def finish(self, recipe_path: Path) -> None:
        last = self._job.recipe.train.max_steps
        command = stage_command("trainer", recipe_path, self._job.root, "summary")
        self._notices.raise_notice("done", str(last), f"trained to step {last:,}", next_command=command)

    def fail(self, error: BaseException) -> None:
        """Raise the notices that follow from the error with which the training ends, besides that of the end."""
        if isinstance(error, NoRoomForWorkers):
            self._notices.raise_notice("no_capacity", self._job.attempt, str(error))
        if exit_code_for(error) == StorageError.exit_code:  # a full disk has no room for the event either
            self._notices.raise_notice("checkpoint_failing", self._job.attempt, str(error), "file-system-full")


def notice_of(event: dict[str, Any]) -> _EventNotice | None:
    """Return the notice of an event; None for an event about which nobody is woken."""
    explain = NOTICED_EVENTS.get(event["event"])
    return explain(event) if explain else None


def _explain_watchdog(event: dict[str, Any]) -> _EventNotice:
    start = f"{event.get('attempt')}/{event.get('start')}"
    return _EventNotice("stalled", start, str(event.get("message")))


def _explain_spike(event: dict[str, Any]) -> _EventNotice:
    text = (
        f"the loss is {event.get('loss')} at step {event.get('step')}, above {event.get('limit')}, since step "
        f"{event.get('first_step')}"
    )
    return _EventNotice("loss_spiked", str(event.get("first_step")), text)


def _explain_exhausted(event: dict[str, Any]) -> _EventNotice:
    text = f"the loss spiked up to step {event.get('step')} after {event.get('rollbacks')} rollbacks; the run goes on"
    return _EventNotice("loss_diverged", str(event.get("step")), text)


def _explain_deviation(event: dict[str, Any]) -> _EventNotice:
    text = f"the run ends at step {event.get('step')} while its loss deviates since step {event.get('first_step')}"
    return _EventNotice("loss_diverged", str(event.get("step")), text)


def _explain_divergence(event: dict[str, Any]) -> _EventNotice:
    text = (
        f"the run diverged at step {event.get('step')}: its gradients or weights are not finite. The same command "
        f"would repeat that; change the recipe"
    )
    return _EventNotice("loss_diverged", str(event.get("step")), text)


def _explain_nan(event: dict[str, Any]) -> _EventNotice | None:
    """A gradient that is finite in only one of two computations is the fault of a node; others are the data's."""
    if event.get("cause") != "hardware":
        return None
    text = (
        f"{event.get('hosts')} (ranks {event.get('ranks')}): the gradient of step {event.get('step')} was finite in "
        f"only one of two computations. The workers start again; replace the node if it happens there again"
    )
    return _EventNotice("node_set_aside", f"{event.get('hosts')}/{event.get('step')}"[:200], text)


def _explain_failed_checkpoint(event: dict[str, Any]) -> _EventNotice:
    text = f"the checkpoint of step {event.get('step')} was not written: {event.get('error')}"
    return _EventNotice("checkpoint_failing", str(event.get("attempt")), text, "file-system-full")


def _explain_fallback(event: dict[str, Any]) -> _EventNotice:
    text = f"newer checkpoints are damaged; the run continues from step {event.get('to_step')}: {event.get('damages')}"
    return _EventNotice("checkpoint_failing", f"fallback/{event.get('to_step')}", text)


NOTICED_EVENTS: dict[str, Callable[[dict[str, Any]], _EventNotice | None]] = {
    "watchdog": _explain_watchdog,
    "loss_spike": _explain_spike,
    "rollbacks_exhausted": _explain_exhausted,
    "loss_deviates_at_end": _explain_deviation,
    "diverged": _explain_divergence,
    "nan": _explain_nan,
    "checkpoint_failed": _explain_failed_checkpoint,
    "fallback": _explain_fallback,
}
"""Events about which the operators of a run get a notice, by their kind."""
