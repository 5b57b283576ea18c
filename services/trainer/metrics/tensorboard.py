"""Writes TensorBoard's events in the step's own thread.

The writer of tensorboardX has a thread that ends at its first failed write; then its queue fills up and the training
process blocks for ever.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def _without_boto3() -> Iterator[None]:
    """Keep tensorboardX from importing boto3, which takes 0.15 s of each start, for event files in S3."""
    found = "boto3" in sys.modules
    if not found:
        sys.modules["boto3"] = None  # type: ignore[assignment] # an import raises ImportError
    try:
        yield
    finally:
        if not found:
            del sys.modules["boto3"]


with _without_boto3():
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c

logger = logging.getLogger(__name__)

FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """Appends events to a file in `folder`. The first failed write is logged and ends the view, not the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._has_failed = False

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step and flush them."""
        if self._has_failed:
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            self._file = self._file or self._open(step)
            self._file.write(_frame(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))
            self._file.flush()
        except OSError as error:
            self._has_failed = True
            logger.warning("TensorBoard's events end before step %d: %s; metrics.jsonl has every step", step, error)
            self.close()

    def close(self) -> None:
        if self._file:
            with suppress(OSError):  # closing flushes, which may fail again
                self._file.close()

    def _open(self, step: int) -> BinaryIO:
        """Create a file whose first event hides the events of earlier attempts from `step` on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        file = (self._folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}").open("wb")
        for event in (
            Event(wall_time=now, file_version=FILE_VERSION),
            Event(wall_time=now, step=step, file_version=FILE_VERSION),
            Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START)),
        ):
            file.write(_frame(event))
        return file


def _frame(event: Event) -> bytes:
    """Encode a record of a TFRecord file: the length, its checksum, the bytes, their checksum."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checksums[0] + data + checksums[1]
