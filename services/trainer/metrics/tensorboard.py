"""TensorBoard's events: a view of the metrics, which a run goes on without.

Written by the training process itself. tensorboardX's writer has a thread that ends at its first failed write; its
queue then fills, and the training process blocks in it for ever.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """Appends events to a file in `folder`. When that fails it says so once, and tries another file after a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._retry_at = time.monotonic()
        self._has_failed = False

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step, to be seen at once; leave them out while that fails."""
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
        """A new file, whose begin hides the events from `step` on that an attempt before this one wrote."""
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
            with suppress(OSError):  # it tries once more to write what it holds
                file.close()


def _frame(event: Event) -> bytes:
    """A record of a TFRecord file: the length, its checksum, the bytes, their checksum."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checksums[0] + data + checksums[1]
