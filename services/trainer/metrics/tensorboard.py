"""Writes TensorBoard's events. They are a view of the metrics: a run goes on while they cannot be written.

The training process writes them itself. The writer of tensorboardX has a thread that ends at its first failed write;
then its queue fills up and the training process blocks for ever.
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

RETRY_SECONDS = 60.0
FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """Appends events to a file in `folder`. After a failure it warns once, and tries again every RETRY_SECONDS."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._retry_at = time.monotonic()
        self._has_failed = False

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step and flush them. Steps are left out while writing fails."""
        if self._file is None and time.monotonic() < self._retry_at:
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            file = self._file or self._open(step)
            file.write(_frame(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))
            file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        try:
            if self._file:
                self._file.close()
        except OSError as error:
            self._give_up(error)

    def _open(self, step: int) -> BinaryIO:
        """Begin a file whose first event hides the events of earlier attempts from `step` on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = file = (self._folder / name).open("wb")
        now = time.time()
        file.write(_frame(Event(wall_time=now, file_version=FILE_VERSION)))
        file.write(_frame(Event(wall_time=now, step=step, file_version=FILE_VERSION)))
        file.write(_frame(Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START))))
        return file

    def _give_up(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(
                "%s: TensorBoard's events cannot be written: %s. The run goes on without them and tries again every "
                "%.0f s; metrics.jsonl has every step.",
                self._folder,
                error.strerror or error,
                RETRY_SECONDS,
            )
        self._has_failed = True
        self._retry_at = time.monotonic() + RETRY_SECONDS
        file, self._file = self._file, None
        if file:
            with suppress(OSError):  # closing flushes, which may fail again
                file.close()


def _frame(event: Event) -> bytes:
    """Encode a record of a TFRecord file: the length, its checksum, the bytes, their checksum."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checksums[0] + data + checksums[1]
