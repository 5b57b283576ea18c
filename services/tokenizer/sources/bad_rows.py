"""Bad rows: rows of an intact file that cannot become documents. They end the stage, or are skipped and counted.

Every reader of the text decides about a row by the row alone, so that all of them skip the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from services.common.artifacts.corpus import BadFile, BadRowReason
from services.common.errors import ArtifactError

R = TypeVar("R")
Locate = Callable[[], str]
_SHOWN_CHARACTERS = 400
_SHOWN_FILES = 5


class BadValue(Exception):
    """A value, or what a file holds instead, that is no document. Its text is the sentence for an error."""

    def __init__(self, reason: BadRowReason, explanation: str) -> None:
        super().__init__(explanation)
        self.reason: BadRowReason = reason


class BadRows:
    """Counts the bad rows that a reader skips, by file and reason, or stops at the first one."""

    def __init__(self, policy: str = "stop") -> None:
        self._policy = policy
        self._rows: dict[str, Counter[BadRowReason]] = {}
        self._first: dict[str, str] = {}
        self.without_text: list[str] = []
        """Files, or parts of them, whose rows are all empty documents, as those of a file with another column are."""

    def add(self, reason: BadRowReason, uri: str, locate: Locate, problem: str) -> None:
        """Count a bad row of a file. With the policy "stop", raise `ArtifactError` with its place and its problem.

        `locate` may read the file to count its lines, and is called for the first bad row alone.
        """
        if self._policy == "stop":
            raise ArtifactError(f'{locate()}: {problem} To leave such rows out, set corpus.bad_rows = "skip".')
        if uri not in self._rows:
            self._rows[uri], self._first[uri] = Counter(), f"{locate()}: {problem}"[:_SHOWN_CHARACTERS]
        self._rows[uri][reason] += 1

    def texts_of(self, uri: str, rows: Iterable[tuple[Locate, R]], text_of: Callable[[R], bytes]) -> Iterator[bytes]:
        """Yield the texts of a file's rows, each of which comes with its place. Those of a `BadValue` are added."""
        for locate, row in rows:
            try:
                yield text_of(row)
            except BadValue as error:
                self.add(error.reason, uri, locate, str(error))

    def files(self) -> tuple[BadFile, ...]:
        """Return the files with bad rows, in the order in which they were read."""
        return tuple(BadFile(uri=uri, rows=dict(rows), first=self._first[uri]) for uri, rows in self._rows.items())


def add_up(files: Iterable[BadFile]) -> list[BadFile]:
    """Add up the rows of each file, of which there are several parts in order. The file with most rows is first."""
    rows: dict[str, Counter[BadRowReason]] = {}
    first: dict[str, str] = {}
    for file in files:
        rows.setdefault(file.uri, Counter()).update(file.rows)
        first.setdefault(file.uri, file.first)
    added = [BadFile(uri=uri, rows=dict(sorted(counts.items())), first=first[uri]) for uri, counts in rows.items()]
    return sorted(added, key=lambda file: (-file.num_rows, file.uri))


def count_by_reason(files: Iterable[BadFile]) -> dict[BadRowReason, int]:
    """Return the number of bad rows of each reason; the most frequent one is first."""
    total: Counter[BadRowReason] = Counter()
    for file in files:
        total.update(file.rows)
    return dict(sorted(total.items(), key=lambda each: (-each[1], each[0])))


def require_few_bad_rows(files: Sequence[BadFile], num_rows: int, max_bad_rows: int) -> None:
    """Raise `ArtifactError`, which names the first files, when there are more than `corpus.max_bad_rows` bad rows."""
    if num_rows > max_bad_rows:
        raise ArtifactError(
            "\n  ".join([f"{num_rows:,} bad rows, and corpus.max_bad_rows is {max_bad_rows:,}:", *show_first(files)])
            + "\nMend the files, or raise corpus.max_bad_rows. What is encoded already is not encoded again."
        )


def show_first(files: Sequence[BadFile]) -> list[str]:
    """Return a line for each of the first files, and one for all others."""
    lines = [f"{file.num_rows:,} in {file.uri}, first {file.first}" for file in files[:_SHOWN_FILES]]
    rest = files[_SHOWN_FILES:]
    return [*lines, f"{sum(file.num_rows for file in rest):,} in {len(rest):,} other files"] if rest else lines


def explain_too_long(num_bytes: int | None, max_document_bytes: int) -> str:
    """Return the sentence for what is above the limit. `num_bytes` is None when reading stopped at the limit."""
    size = f"{num_bytes:,} bytes" if num_bytes is not None else f"more than {max_document_bytes:,} bytes"
    return f"{size}, expected at most corpus.max_document_bytes = {max_document_bytes:,}."
