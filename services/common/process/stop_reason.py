"""Names the reasons for which a run stops early."""

from __future__ import annotations

import enum


class StopReason(enum.IntEnum):
    """Reasons to stop, from the weakest to the strongest."""

    NONE = 0
    TIME_LIMIT = 1
    STOP_FILE = 2
    # The command hears of these, and passes them on through the stop file.
    PREEMPTION = 3
    SIGTERM = 4
    INTERRUPT = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")
