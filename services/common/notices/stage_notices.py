"""The notices that a stage's command raises about its own work."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.artifacts.attempt import this_attempt
from services.common.artifacts.store import Address, Draft, Workspace
from services.common.artifacts.upstream import stage_command
from services.common.errors import StorageError
from services.common.notices.channels import open_channels
from services.common.notices.notice import Notice
from services.common.notices.notifier import Notifier
from services.common.notices.variables import RELAY, RELAY_VARIABLE
from services.common.process.entry_point import exit_code_for
from services.common.recipe.schema import NoticeCondition, Notify, Recipe, Stage

logger = logging.getLogger(__name__)

LIFECYCLE: tuple[NoticeCondition, ...] = ("started", "done", "ended", "no_capacity")
"""Conditions that a process which relays notices sees itself, also where the stage's command was lost."""
BATCH_VARIABLE = "AWS_BATCH_JOB_ID"
"""Environment variable that AWS Batch sets in the containers of its jobs."""
NOTICES_FOLDER = "notices"
"""Folder of the root with the outboxes of stages that have no run."""
FULL_PERCENT, CLEAR_PERCENT = 85.0, 80.0
"""Shares of the file system at which a notice is sent, and below which the next one may be."""
LOOK_SECONDS = 60.0
_EXIT_MEANINGS = {
    1: "a bug; its traceback is in the log",
    2: "the recipe",
    3: "an artifact",
    4: "a device, a backend or a missing tool",
    5: "the file system is full or read-only",
    75: "the same command goes on from the newest committed state",
    130: "Ctrl-C; the same command goes on from the newest committed state",
}


def outbox_of_artifact(address: Address, stage: Stage) -> Path:
    """Return the outbox of a stage that makes this artifact."""
    return address.root / NOTICES_FOLDER / f"{stage}-{address.id}.jsonl"


class StageNotices:
    """Raises the notices of one command. Without a channel, nothing is written and no thread runs."""

    def __init__(
        self, outbox: Path, notify: Notify, *, subject: str, root: Path, next_command: str, report: str = ""
    ) -> None:
        """`next_command` is the command that shows the state, and `report` the path of the run's report."""
        self._notify, self._subject = notify, subject
        self._next_command, self._report = next_command, report
        self._attempt = str(this_attempt() or f"{os.getpid()}@{os.urandom(4).hex()}")
        self._notifier: Notifier | None = None
        self._is_relayed = is_relayed = os.environ.get(RELAY_VARIABLE) == RELAY
        self._command_of_target = "make stage-status" if is_relayed else ""
        if os.environ.get(BATCH_VARIABLE):
            self._command_of_target = "make stage-status TARGET=batch"
        channels, problem = ([], "") if is_relayed else open_channels(notify)
        if problem:
            logger.warning("no notice goes to a webhook: %s", problem)
        if channels or is_relayed:
            self._notifier = Notifier(outbox, channels)
            self._watch = _FileSystemWatch(self, root)

    def raise_notice(
        self, condition: NoticeCondition, key: str, text: str, page: str = "", next_command: str = ""
    ) -> None:
        """Send a notice once for its condition and `key`, where the recipe wants the condition. Returns at once.

        `page` names another runbook than the condition's, and `next_command` another command than the stage's.
        """
        is_told_by_other = self._is_relayed and condition in LIFECYCLE
        if self._notifier and condition in self._notify.conditions and not is_told_by_other:
            self._notifier.raise_notice(
                Notice(
                    condition,
                    f"{condition}/{key}" if key else condition,
                    self._subject,
                    text,
                    report=self._report,
                    next_command=self._command_of_target or next_command or self._next_command,
                    page=page,
                    topic=self._notify.topic or "",
                )
            )

    def clear(self, condition: NoticeCondition) -> None:
        """Let a notice without a key of its own be sent again, because its condition is over."""
        if self._notifier:
            self._notifier.clear(condition)

    def raise_end(self, error: BaseException) -> None:
        """Send the notice of a command that ends with an error, once for this attempt."""
        code = exit_code_for(error)
        meaning = _EXIT_MEANINGS.get(code, "unknown")
        page = "file-system-full" if code == StorageError.exit_code else ""
        self.raise_notice("ended", self._attempt, f"exit code {code} ({meaning}): {error}", page)

    @property
    def attempt(self) -> str:
        """Name of this attempt at the command, which a scheduler may have given."""
        return self._attempt

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        if self._notifier:
            self._watch.stop()
            self._notifier.close()


@contextmanager
def notifying(notices: StageNotices) -> Iterator[StageNotices]:
    """Send a notice where the block ends with an error, and close the notices in any case."""
    try:
        yield notices
    except BaseException as error:
        notices.raise_end(error)
        raise
    finally:
        notices.close()


class BuildNotices:
    """The notices of a stage that makes an artifact, unless it finds the artifact published."""

    def __init__(self, stage: Stage, recipe: Recipe, recipe_path: Path, address: Address) -> None:
        self._stage, self._recipe, self._address = stage, recipe, address
        self._next_command = stage_command(stage, recipe_path, address.root)
        self._opened: StageNotices | None = None

    def around(self, build: Callable[[Workspace], Draft]) -> Callable[[Workspace], Draft]:
        """Return `build` with a notice of its begin. It runs under the artifact's lease, so that one process at a time
        has the outbox.
        """

        def build_with_notice(workspace: Workspace) -> Draft:
            self._opened = StageNotices(
                outbox_of_artifact(self._address, self._stage),
                self._recipe.notify,
                subject=f"{self._stage} {self._address.name}/{self._address.id}",
                root=self._address.root,
                next_command=self._next_command,
            )
            self._opened.raise_notice("started", "", f"making {self._address.path}")
            return build(workspace)

        return build_with_notice

    def finish(self) -> None:
        if self._opened:
            self._opened.raise_notice("done", "", f"published {self._address.path}")

    def fail(self, error: BaseException) -> None:
        if self._opened:
            self._opened.raise_end(error)

    def close(self) -> None:
        if self._opened:
            self._opened.close()


@contextmanager
def notifying_stage(stage: Stage, recipe: Recipe, recipe_path: Path, address: Address) -> Iterator[BuildNotices]:
    """Send the notices of a stage whose block publishes the artifact at `address`, if it builds it."""
    notices = BuildNotices(stage, recipe, recipe_path, address)
    try:
        yield notices
        notices.finish()
    except BaseException as error:
        notices.fail(error)
        raise
    finally:
        notices.close()


class _FileSystemWatch:
    """Looks at the space of the root every minute, in a thread: the call hangs where the file system's server does."""

    def __init__(self, notices: StageNotices, root: Path) -> None:
        self._notices, self._root = notices, root
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="file system", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while True:
            try:
                usage = shutil.disk_usage(self._root)
            except OSError as error:
                logger.debug("no usage of %s: %s", self._root, error)
            else:
                self._judge(usage.used, usage.used + usage.free)
            if self._is_over.wait(LOOK_SECONDS):
                return

    def _judge(self, used: int, total: int) -> None:
        """Compare what is used with what this user could use, as `df` does, which leaves out blocks kept for root."""
        percent = 100 * used / total if total else 0.0
        if percent > FULL_PERCENT:
            left = f"{(total - used) / 1e9:,.1f} of {total / 1e9:,.0f} GB are free"
            self._notices.raise_notice("file_system_filling", "", f"{self._root}: {percent:.0f} % are used, {left}")
        elif percent < CLEAR_PERCENT:
            self._notices.clear("file_system_filling")
