"""Sends the notices of an outbox from a thread of its own, so that no work ever waits for a receiver."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from services.common.notices.channels import Channel, NotSent
from services.common.notices.notice import Notice
from services.common.notices.outbox import Outbox

logger = logging.getLogger(__name__)

SEND_SECONDS = 5.0
"""Seconds after which a request is left alone. A thread waits for it: a lookup in the DNS has no timeout of its own."""
CLOSE_SECONDS = 11.0
"""Seconds for which the end of a command waits for its last notices: a request on both channels, and a margin."""
QUEUED_NOTICES = 100
_MAX_HANGING = 4
"""Most requests that may hang at a time."""
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 1.0, 300.0
_RETRY_FACTOR = 4.0
_RELAY_SECONDS = 5.0
"""Seconds between two looks at the outboxes of other processes."""
_MAX_RELAYED = 20
"""Most notices of another process's outbox that one look sends."""


class Notifier:
    """Sends notices on all channels, each in the order in which they were raised, until each has taken them.

    A channel that fails is tried again after 1, 4, 16 ... and at most 300 seconds. What is left when the process ends
    is sent by the next process with this outbox.
    """

    def __init__(
        self, path: Path, channels: Sequence[Channel], relayed: Callable[[], Iterable[Path]] | None = None
    ) -> None:
        """`relayed` finds the outboxes of processes that reach no receiver, whose notices are sent as well."""
        self._channels = [_ChannelState(channel) for channel in channels]
        self._outbox, self._relayed = Outbox(path), relayed
        self._others: dict[Path, Outbox] = {}
        self._queue: queue.Queue[Notice | str | None] = queue.Queue(QUEUED_NOTICES)
        self._raised: set[str] = set()
        """Keys that this process has raised: a caller that repeats a notice at every look must not fill the queue."""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def raise_notice(self, notice: Notice) -> None:
        """Send a notice, unless one with its key was raised before. Returns at once."""
        if notice.key not in self._raised:
            self._raised.add(notice.key)
            self._put(notice)

    def clear(self, key: str) -> None:
        """Let a notice with this key be sent again. Returns at once."""
        self._raised.discard(key)
        self._put(key)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Try once more to send what is left, for at most so many seconds."""
        self._is_closing.set()
        self._put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning("notices are left in %s; the next command sends them", self._outbox.path)

    def _put(self, item: Notice | str | None) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:  # the thread hangs, as on a file system whose server is gone
            if isinstance(item, Notice):
                self._raised.discard(item.key)
            logger.warning("a notice is dropped, because %d others wait for %s", QUEUED_NOTICES, self._outbox.path)

    def _run(self) -> None:
        try:
            self._outbox.read()
            self._deliver()
            while not self._is_closing.is_set():
                with suppress(queue.Empty):
                    self._take(self._queue.get(timeout=self._seconds_to_next_look()))
                self._deliver()
            while not self._queue.empty():
                self._take(self._queue.get_nowait())
            for channel in self._channels:
                channel.retry_now()
            self._deliver()
        except Exception:
            logger.exception("no notice is sent any more; the work goes on")  # a bug here must not harm a run

    def _take(self, item: Notice | str | None) -> None:
        if isinstance(item, Notice):
            self._outbox.add(item)
        elif item:
            self._outbox.clear(item)

    def _seconds_to_next_look(self) -> float | None:
        waits = [channel.seconds_left for channel in self._channels if channel.seconds_left]
        if self._relayed:
            waits.append(_RELAY_SECONDS)
        return min(waits, default=None)

    def _deliver(self) -> None:
        for outbox in [self._outbox, *self._find_others()]:
            limit = None if outbox is self._outbox else _MAX_RELAYED
            for channel in self._channels:
                channel.deliver(outbox, limit)

    def _find_others(self) -> list[Outbox]:
        if not self._relayed:
            return []
        try:
            paths = list(self._relayed())
        except OSError as error:
            logger.warning("the outboxes of the stages cannot be found: %s", error)
            return []
        self._others = {path: self._others.get(path) or Outbox(path) for path in paths}
        for outbox in self._others.values():
            outbox.read()
        return list(self._others.values())


class _ChannelState:
    """A channel with the time of its next try."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._due_at, self._retry_seconds = 0.0, _FIRST_RETRY_SECONDS
        self._has_failed = False
        self._hanging: list[threading.Thread] = []

    @property
    def seconds_left(self) -> float:
        """Seconds to the next try after a failure; 0 where the channel works."""
        return max(0.01, self._due_at - time.monotonic()) if self._has_failed else 0.0

    def retry_now(self) -> None:
        self._due_at = 0.0

    def deliver(self, outbox: Outbox, limit: int | None) -> None:
        """Send the notices of an outbox that this channel has not sent, up to the first failure."""
        pending = [notice for notice in outbox.pending(self._channel.name) if self._channel.takes(notice)]
        if not pending or time.monotonic() < self._due_at:
            return
        for notice in pending[:limit]:
            try:
                self._send(notice)
            except NotSent as error:
                logger.warning("the notice %s was not sent to the %s: %s", notice.key, self._channel.name, error)
                if error.is_final:
                    outbox.finish(notice, self._channel.name, refusal=str(error))
                    continue
                self._has_failed, self._due_at = True, time.monotonic() + self._retry_seconds
                self._retry_seconds = min(_RETRY_FACTOR * self._retry_seconds, _LONGEST_RETRY_SECONDS)
                return
            outbox.finish(notice, self._channel.name)
            self._has_failed, self._due_at, self._retry_seconds = False, 0.0, _FIRST_RETRY_SECONDS

    def _send(self, notice: Notice) -> None:
        """Send within SEND_SECONDS, also where a lookup in the DNS hangs, or an answer comes byte by byte."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= _MAX_HANGING:
            raise NotSent(f"{_MAX_HANGING} earlier requests hang")
        answers: queue.SimpleQueue[NotSent | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                self._channel.send(notice)
            except NotSent as error:
                answers.put(error)
            except Exception as error:  # noqa: BLE001 - a library's error; its text may hold the address
                answers.put(NotSent(type(error).__name__))
            else:
                answers.put(None)

        thread = threading.Thread(target=work, name=f"notice to {self._channel.name}", daemon=True)
        thread.start()
        try:
            error = answers.get(timeout=SEND_SECONDS)
        except queue.Empty:
            self._hanging.append(thread)
            raise NotSent(f"no answer within {SEND_SECONDS:.0f} s") from None
        if error:
            raise error
