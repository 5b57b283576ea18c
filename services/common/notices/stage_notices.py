"""The notices that a stage's command raises about its own work."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.common.artifacts.attempt import this_attempt
from services.common.artifacts.store import Address, Artifact, Draft, M, Workspace, publish_once
from services.common.artifacts.upstream import stage_command
from services.common.errors import StorageError
from services.common.launch.batch.node import JOB_ID
from services.common.notices.channels import open_channels
from services.common.notices.notice import Notice, name_occurrence
from services.common.notices.notifier import Notifier
from services.common.notices.variables import RELAY, RELAY_VARIABLE
from services.common.process.entry_point import exit_code_for
from services.common.process.file_system_space import Space, measure_space
from services.common.recipe.schema import NoticeCondition, Notify, Recipe, Stage

logger = logging.getLogger(__name__)

LIFECYCLE: tuple[NoticeCondition, ...] = ("started", "done", "ended", "no_capacity")
"""Conditions that a process which relays notices sees itself, also where the stage's command was lost."""
NOTICES_FOLDER = "notices"
"""Folder of the root with the outboxes of stages that have no run."""
FULL_SHARE, CLEAR_SHARE = 0.85, 0.8
"""Shares of the file system above which a notice is sent, and below which the next one may be."""
LOOK_SECONDS = 60.0
"""Seconds between two looks at the space of the file system."""
_EXIT_MEANINGS = {
    1: "a bug; its traceback is in the log",
    2: "the recipe",
    3: "an artifact",
    4: "a device, a backend or a missing tool",
    5: "the file system is full or read-only",
    75: "the same command goes on from the newest committed state",
    130: "Ctrl-C; the same command goes on from the newest committed state",
}


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
        if os.environ.get(JOB_ID):
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
        has_other_sender = self._is_relayed and condition in LIFECYCLE
        if self._notifier and condition in self._notify.conditions and not has_other_sender:
            self._notifier.raise_notice(
                Notice(
                    condition,
                    name_occurrence(condition, key),
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


def publish_with_notices(
    address: Address,
    manifest_type: type[M],
    stage: Stage,
    recipe: Recipe,
    recipe_path: Path,
    build: Callable[[Workspace], Draft],
) -> tuple[Artifact[M], bool]:
    """Call `publish_once`, with notices of the begin and the end of the build; none where the artifact is published.

    The notices begin under the artifact's lease, so that one process at a time has the outbox.
    """
    with ExitStack() as stack:
        opened: list[StageNotices] = []

        def build_with_notice(workspace: Workspace) -> Draft:
            notices = StageNotices(
                address.root / NOTICES_FOLDER / f"{stage}-{address.id}.jsonl",
                recipe.notify,
                subject=f"{stage} {address.name}/{address.id}",
                root=address.root,
                next_command=stage_command(stage, recipe_path, address.root),
            )
            opened.append(stack.enter_context(notifying(notices)))
            notices.raise_notice("started", "", f"making {address.path}")
            return build(workspace)

        published = publish_once(address, manifest_type, stage, recipe, build_with_notice)
        for notices in opened:
            notices.raise_notice("done", "", f"published {address.path}")
        return published


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
                self._judge(measure_space(self._root))
            except OSError as error:
                logger.debug("the space of %s is unknown: %s", self._root, error)
            if self._is_over.wait(LOOK_SECONDS):
                return

    def _judge(self, space: Space) -> None:
        if space.used_share > FULL_SHARE:
            left = f"{space.available_bytes / 1e9:,.1f} of {space.size_bytes / 1e9:,.0f} GB are free"
            text = f"{self._root}: {100 * space.used_share:.0f} % are used, {left}"
            self._notices.raise_notice("file_system_filling", "", text)
        elif space.used_share < CLEAR_SHARE:
            self._notices.clear("file_system_filling")
