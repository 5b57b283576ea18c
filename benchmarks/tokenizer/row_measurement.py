"""The measurement of one row of the table: time, memory, stored bytes and a digest of the ids."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass
class RowMeasurement:
    """The result of one run of a row."""

    wall_seconds: float
    cpu_seconds: float | None
    """CPU time, or None for a row whose rate is per second of wall time."""
    texts: int = 1
    """Number of times that the text was encoded."""
    tokens: int = 0
    stored_bytes: int = 0
    """Bytes of all files that the row leaves, with caches."""
    ids_digest: str = ""
    """Digest of all documents' ids without BOS and EOS, for rows that keep documents apart."""
    samples: int = 0
    notes: list[str] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def rate(self, text_bytes: int) -> float:
        """Return samples, or MB of text, a second."""
        seconds = self.wall_seconds if self.cpu_seconds is None else self.cpu_seconds
        return (self.samples or self.texts * text_bytes / 1e6) / seconds

    def add_ids(self, documents: Iterable[npt.NDArray[np.integer] | list[int]]) -> RowMeasurement:
        """Count and hash the documents' ids. Equal hashes mean equal ids of all documents."""
        digest = hashlib.sha256()
        for ids in documents:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.asarray(ids, np.uint32).tobytes())
            self.tokens += len(ids)
        self.ids_digest = digest.hexdigest()
        return self


class Watch:
    """Measures wall time, and CPU time of this process and of its children that have ended."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def stop(self) -> RowMeasurement:
        return RowMeasurement(time.perf_counter() - self._wall, _cpu_seconds() - self._cpu)


def peak_memory_bytes() -> int:
    """Return the peak memory of this process. `ru_maxrss` is wrong here: a program inherits the value of its parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _cpu_seconds() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)
