"""The outbox of a run: a file with the notices that were raised and those that were sent.

A notice is appended before it is sent, and its sending is recorded afterwards, as in the pattern "transactional
outbox". A process that is killed between the two leaves a notice that the next process sends again, so a notice is sent
at least once: a second message costs a glance, and a lost one a night of nodes. The second message has the key of the
first one. Nothing else is sent twice, across all restarts and attempts.

The file grows with the notices, and neither with steps nor with nodes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.errors import StorageError
from services.common.input.files import open_for_append, open_regular_file
from services.common.notices.notice import MAX_KEY_CHARACTERS, Notice
from services.common.process.telemetry import read_json_lines

logger = logging.getLogger(__name__)

OUTBOX_FILE = "notices.jsonl"
KEPT_SECONDS = 86_400.0
"""Seconds after which a notice that could not be sent is given up: nobody wants the news of last month."""


class Outbox:
    """The notices of one run, deployment or stage. One process at a time sends them; several may raise them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._notices: dict[str, Notice] = {}
        self._finished: set[tuple[str, str]] = set()
        """Key and channel of each notice that was sent, or that the receiver refused for good."""
        self._num_bytes = -1
        self._is_end_checked = False

    def read(self) -> None:
        """Read the file where it has grown since the last call. A file that cannot be read is only logged."""
        try:
            num_bytes = self.path.stat().st_size if self.path.exists() else 0
            if num_bytes == self._num_bytes:
                return
            lines = read_json_lines(self.path)
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.path, error)
            return
        self._num_bytes = num_bytes
        for line in lines:
            if line is not None:
                self._take(line)

    def add(self, notice: Notice) -> bool:
        """Append a notice. Returns False where one with its key was raised before and has not been cleared."""
        self.read()
        notice = notice.masked()
        if notice.key in self._notices:
            return False
        self._notices[notice.key] = notice
        self._append({"raised": asdict(notice)})
        return True

    def clear(self, key: str) -> None:
        """Let a notice with this key be raised again, because its condition is over."""
        self.read()
        if key in self._notices:
            self._forget(key)
            self._append({"cleared": key, "time": time.time()})

    def pending(self, channel: str) -> list[Notice]:
        """Return the notices that the channel has not sent, oldest first."""
        oldest = time.time() - KEPT_SECONDS
        return [
            notice
            for key, notice in self._notices.items()
            if (key, channel) not in self._finished and notice.time > oldest
        ]

    def finish(self, notice: Notice, channel: str, refusal: str = "") -> None:
        """Record that the channel has sent the notice, or that its receiver has refused it for good."""
        self._finished.add((notice.key, channel))
        line = {"refused": notice.key, "reason": refusal} if refusal else {"sent": notice.key}
        self._append(line | {"channel": channel, "time": time.time()})

    def _take(self, line: dict[str, Any]) -> None:
        if notice := Notice.from_fields(line.get("raised")):
            self._notices.setdefault(notice.key, notice)
        for name in ("sent", "refused"):
            if isinstance(key := line.get(name), str) and len(key) <= MAX_KEY_CHARACTERS:
                self._finished.add((key, str(line.get("channel"))))
        if isinstance(key := line.get("cleared"), str):
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._notices.pop(key, None)
        self._finished = {each for each in self._finished if each[0] != key}

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line durably. Without room for it the notice is still sent, and perhaps again after a restart."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = b"\n" if self._ends_torn() else b""
            with open_for_append(self.path) as file:
                os.write(file.fileno(), torn + json.dumps(line).encode() + b"\n")  # one call, for several processes
                os.fsync(file.fileno())
        except (OSError, StorageError) as error:
            logger.warning("%s cannot be written: %s", self.path, error)

    def _ends_torn(self) -> bool:
        """Tell whether a killed process has left half a line, which would spoil the next one."""
        if self._is_end_checked:
            return False
        self._is_end_checked = True
        try:
            with open_regular_file(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                return size > 0 and file.read(1) != b"\n"
        except FileNotFoundError:
            return False
