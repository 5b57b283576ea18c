"""Reports the progress of the stage that this process runs, as records for other programs.

The newest record is in the file that MILLRACE_PROGRESS_FILE names, which is replaced at most once a second, and
`current_progress` returns it inside of the process. A stage reports nothing to a network, and a file that cannot be
written never harms it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from services.common.input.files import open_regular_file

logger = logging.getLogger(__name__)

PROGRESS_FILE_VARIABLE = "MILLRACE_PROGRESS_FILE"
WRITE_SECONDS = 1.0
"""Seconds between two writes of the progress file; the begin and the end of a phase are written at once."""
STARTING = "starting"
PUBLISHED, ALREADY_PUBLISHED = "published", "already published"
"""Last phase of a stage that has made its artifact, and of one that has found it published."""
_MAX_BYTES = 65_536


@dataclass(frozen=True)
class ProgressRecord:
    """The progress of a stage at one time."""

    stage: str
    phase: str
    """Name of the present piece of work, such as `encode`; STARTING before the first, PUBLISHED or ALREADY_PUBLISHED
    after the last."""
    done: float = 0.0
    total: float = 0.0
    """Amount of work in the phase, in `unit`; 0 where the phase is not measured."""
    unit: str = ""
    per_second: float | None = None
    """Rate of the last minutes; None before it is known."""
    seconds_left: float | None = None
    """Seconds until the end of the phase at this rate; None before it is known, and in a hang."""
    note: str = ""
    """Further text for people, such as the loss; the artifact's folder after the last phase."""
    time: float = 0.0
    """Time of the record in seconds since 1970."""


Measure = Callable[[], ProgressRecord]
"""Returns the present progress of a phase; stage and time may be empty."""


@contextmanager
def reporting_progress(stage: str) -> Iterator[None]:
    """Report the progress of `stage` during the block, which is the stage's whole command."""
    global _reporter  # noqa: PLW0603 - a process runs one stage
    path = os.environ.get(PROGRESS_FILE_VARIABLE)
    before, _reporter = _reporter, _Reporter(stage, Path(path) if path else None)
    try:
        _reporter.write()
        yield
    finally:
        _reporter = before


@contextmanager
def measuring(measure: Measure) -> Iterator[None]:
    """Report what `measure` returns, during the block."""
    reporter = _reporter
    if reporter is None:
        yield
        return
    reporter.begin(measure)
    try:
        yield
    finally:
        reporter.end()


def report_phase(name: str) -> AbstractContextManager[None]:
    """Report a phase whose amount of work is not measured, during the block."""
    return measuring(lambda: ProgressRecord("", name))


def report_advance() -> None:
    """Write the progress file if the last write is WRITE_SECONDS old. A measure calls it after every advance."""
    if _reporter:
        _reporter.write_if_due()


def report_published(artifact: Path, is_new: bool) -> None:
    """Report that the stage's artifact is complete in folder `artifact`, and whether this command has made it."""
    if _reporter:
        phase = PUBLISHED if is_new else ALREADY_PUBLISHED
        _reporter.begin(lambda: ProgressRecord("", phase, note=str(artifact)))


def current_progress() -> ProgressRecord | None:
    """Return the present progress of this process's stage, from any thread; None where it runs no stage."""
    return _reporter.measure() if _reporter else None


def read_progress(path: Path) -> ProgressRecord | None:
    """Return the record of a progress file; None where there is none, or something else is in its place."""
    try:
        with open_regular_file(path) as file:
            return _parser().validate_json(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None


@cache
def _parser() -> TypeAdapter[ProgressRecord]:
    return TypeAdapter(ProgressRecord)


class _Reporter:
    """Holds the nested phases of a stage, and writes the innermost one's progress."""

    def __init__(self, stage: str, path: Path | None) -> None:
        self._stage, self._path = stage, path
        self._measures: list[Measure] = [lambda: ProgressRecord("", STARTING)]
        self._written_at = 0.0
        self._lock = threading.Lock()

    def begin(self, measure: Measure) -> None:
        self._measures.append(measure)
        self.write()

    def end(self) -> None:
        self._measures.pop()
        self.write()

    def measure(self) -> ProgressRecord:
        return replace(self._measures[-1](), stage=self._stage, time=time.time())

    def write_if_due(self) -> None:
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Replace the progress file. A file that cannot be written is given up with one warning."""
        if self._path is None:
            return
        with self._lock:
            self._written_at = time.monotonic()
            partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            try:
                partial.write_text(json.dumps(asdict(self.measure())), encoding="utf-8")
                partial.replace(self._path)
            except OSError as error:
                logger.warning("%s=%s is not written any more: %s", PROGRESS_FILE_VARIABLE, self._path, error)
                self._path = None


_reporter: _Reporter | None = None
