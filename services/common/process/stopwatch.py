"""Measures how long a state lasts, without the time for which the measuring process was itself stopped."""

from __future__ import annotations

import time

_MOST_SECONDS_BETWEEN_LOOKS = 2.0


class Stopwatch:
    """Sums the seconds for which a state lasts, from look to look.

    The time between two looks counts for at most 2 s: the looking process may itself have been stopped, as by Ctrl-Z.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at: float | None = None

    def look(self, lasts: bool) -> float:
        """Seconds for which the state has lasted until this look; 0 where `lasts` says that it has ended."""
        now = time.monotonic()
        if not lasts:
            self.seconds, self._looked_at = 0.0, None
        elif self._looked_at is None:
            self._looked_at = now
        else:
            self.seconds += min(now - self._looked_at, _MOST_SECONDS_BETWEEN_LOOKS)
            self._looked_at = now
        return self.seconds
