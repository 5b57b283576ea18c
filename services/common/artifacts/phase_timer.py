"""Times the phases of a stage for its manifest, and reports them as its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from services.common.artifacts.manifest import Phase
from services.common.process.progress_record import report_phase


class PhaseTimer:
    """Collects name, start and duration of each phase."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_at, start = datetime.now(UTC), time.perf_counter()
        with report_phase(name):
            yield
        self.phases.append(Phase(name=name, started_at=started_at, seconds=round(time.perf_counter() - start, 3)))
