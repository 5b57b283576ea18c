"""Names the reasons for which a run stops early, for workers and for the agents that hear some of the reasons."""

from __future__ import annotations

import enum


class StopReason(enum.IntEnum):
    """Reasons to stop, from the weakest to the strongest."""

    NONE = 0
    TIME_LIMIT = 1
    PREEMPTION = 2
    STOP_FILE = 3
    # The command gets these signals, and passes them on through the stop file.
    SIGTERM = 4
    INTERRUPT = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")
