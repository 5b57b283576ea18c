"""Writes TensorBoard's events in the step's own thread.

The writer of tensorboardX has a thread that ends at its first failed write; then its queue fills up and the training
process blocks for ever.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

logger = logging.getLogger(__name__)


class TensorBoard:
    """Appends events to a file in `folder`. The first failed write is logged and ends the view, not the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: _EventFile | None = None
        self._has_failed = False

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step and flush them."""
        if self._has_failed:
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            self._file = self._file or _EventFile(self._folder, step)
            self._file.add(step=step, summary=Summary(value=values))
        except OSError as error:
            self._has_failed = True
            logger.warning("TensorBoard's events end before step %d: %s; metrics.jsonl has every step", step, error)
            self.close()

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # closing flushes, which may fail again
                self._file.close()


class _EventFile(RecordWriter):  # type: ignore[misc]
    """A file whose first events hide those of earlier attempts from `step` on."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(str(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"))
        self.add(file_version="brain.Event:2")
        self.add(step=step, session_log=SessionLog(status=SessionLog.START))

    def add(self, **fields: object) -> None:
        self.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()  # `flush` would wait for the disk
