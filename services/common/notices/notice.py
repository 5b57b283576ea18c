"""A notice: one message to the people who operate a run, about one condition of the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

from services.common.input.credentials import mask
from services.common.recipe.schema import NoticeCondition

RUNBOOKS = "docs/operations/runbooks"
"""Folder of the runbooks in the repository."""
MAX_TEXT_CHARACTERS = 1_000
MAX_KEY_CHARACTERS = 300
_MAX_FIELD_CHARACTERS = 2_000

_TITLES: dict[NoticeCondition, str] = {
    "started": "started",
    "done": "done",
    "ended": "ended early",
    "stalled": "stalled",
    "no_capacity": "waits for nodes that do not come",
    "checkpoint_failing": "cannot write or read checkpoints",
    "file_system_filling": "file system is filling up",
    "loss_spiked": "loss spiked",
    "loss_diverged": "loss diverged",
    "node_set_aside": "node set aside",
}
_PAGES: dict[NoticeCondition, str] = {
    "started": "",
    "done": "",
    "ended": "README",
    "stalled": "stall",
    "no_capacity": "no-capacity",
    "checkpoint_failing": "checkpoint-damaged",
    "file_system_filling": "file-system-full",
    "loss_spiked": "run-diverges",
    "loss_diverged": "run-diverges",
    "node_set_aside": "node-lost",
}


def name_occurrence(condition: NoticeCondition, occurrence: str) -> str:
    """Return the key of a notice: its condition and, where that may occur again, the name of the occurrence."""
    return f"{condition}/{occurrence}" if occurrence else condition


@dataclass(frozen=True)
class Notice:
    """A message about one condition of one run, deployment or stage."""

    condition: NoticeCondition
    key: str
    """Name of the occurrence, such as `loss_spiked/1200`. A notice is sent once for each key of its outbox."""
    subject: str
    """Run, deployment or stage that the notice is about, such as `trainer llama2-7b-0123abcd`."""
    text: str
    report: str = ""
    """Path of the run's report; empty where there is none."""
    next_command: str = ""
    page: str = ""
    """Name of the runbook's page, where it is another than the condition's."""
    topic: str = ""
    """ARN of the recipe's SNS topic, for a process that sends the notices of others; empty for that process's own."""
    time: float = field(default_factory=time.time)

    @property
    def title(self) -> str:
        return f"{self.subject}: {_TITLES[self.condition]}"

    @property
    def runbook(self) -> str:
        """Path of the runbook in the repository; empty where the condition needs none."""
        page = self.page or _PAGES[self.condition]
        return f"{RUNBOOKS}/{page}.md" if page else ""

    @property
    def links(self) -> dict[str, str]:
        """Report, next command and runbook, by their names; those that the notice lacks are left out."""
        named = {"report": self.report, "next": self.next_command, "runbook": self.runbook}
        return {name: value for name, value in named.items() if value}

    def masked(self) -> Self:
        """Return the notice with possible credentials masked and with a short text."""
        text = mask(self.text)
        if len(text) > MAX_TEXT_CHARACTERS:
            text = text[: MAX_TEXT_CHARACTERS - 4].rpartition(" ")[0] + " ..."
        return replace(
            self,
            subject=mask(self.subject),
            text=text,
            report=mask(self.report),
            next_command=mask(self.next_command),
        )

    @classmethod
    def from_fields(cls, values: Any) -> Self | None:
        """Return the notice of a line of an outbox, which another process may have damaged; None if it is not one."""
        if not isinstance(values, dict):
            return None
        names = {"condition", "key", "subject", "text", "report", "next_command", "page", "topic"}
        if not all(isinstance(values.get(name), str) for name in names):
            return None
        is_short = all(len(values[name]) <= _MAX_FIELD_CHARACTERS for name in names)
        if not (
            is_short and values["condition"] in get_args(NoticeCondition) and isinstance(values.get("time"), float)
        ):
            return None
        return cls(**{name: values[name] for name in names}, time=values["time"]).masked()
