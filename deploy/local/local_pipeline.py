"""Runs the three stages as programs of this machine, and shows them in one view.

The tokenizer and the compiler need nothing of each other, and run side by side; the trainer begins when both have
ended. Every stage runs as it would alone, so whatever ends this command, the same command continues.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from deploy.client.pipeline_view import PipelineView
from deploy.exit_codes import EXIT_AGAIN, find_error_line, resolve_exit_code
from deploy.stage_contract import make_command
from services.common.errors import EXIT_INTERRUPTED
from services.common.process.progress import PROGRESS_SECONDS_VARIABLE
from services.common.process.shutdown import exit_code_after, on_stop_signal
from services.common.recipe.schema import STAGES, Stage

ORDER: tuple[tuple[Stage, ...], ...] = (("tokenizer", "compiler"), ("trainer",))
"""Stages that run side by side, since they need nothing of each other."""
POLL_SECONDS = 0.2
PROGRESS_SECONDS = "1"
"""Seconds between two lines of a stage's progress, where the view shows them in its table."""
LAST_LINES_SECONDS = 5.0
"""Seconds to wait for the output of an ended stage: a process that it has left behind may hold the pipes open."""
KEPT_LINES = 50


@dataclass(frozen=True)
class LocalPipeline:
    """A pipeline on this machine."""

    recipe: Path
    root: Path
    arguments: tuple[str, ...]
    """Options of all three stages."""
    repetition: str
    """The command that continues this pipeline, for people."""

    def command_of(self, stage: Stage) -> list[str]:
        return [sys.executable, *make_command(stage, str(self.recipe), str(self.root), self.arguments)[1:]]


def run_local_pipeline(pipeline: LocalPipeline, *, is_dry_run: bool = False, is_shown: bool = False) -> int:
    """Run the stages up to the first that fails, and return that stage's exit code.

    A stop signal is passed on to the stages that run, and no further stage begins. A dry run prints the commands.
    With `is_shown` print at the end what the stages made, and a sample of the model's writing.
    """
    if is_dry_run:
        print("\n".join(shlex.join(pipeline.command_of(stage)) for stage in STAGES))
        print("\nDRY_RUN=1: nothing was changed")
        return 0
    with PipelineView(STAGES, pipeline.repetition) as view:
        runner = _Runner(pipeline, view)
        with on_stop_signal(runner.pass_on, again=runner.pass_on):
            exit_code = runner.run()
    if exit_code or not is_shown:
        return exit_code
    words = ("summary", Path(view.folder_of("trainer")).name, "--root", str(pipeline.root))
    command = [sys.executable, "-m", "services.trainer", *words]
    return resolve_exit_code(subprocess.run(command, check=False).returncode)


class _Runner:
    """Starts the stages in their order, follows them, and passes signals on."""

    def __init__(self, pipeline: LocalPipeline, view: PipelineView) -> None:
        self._pipeline, self._view = pipeline, view
        self._running: list[_StageProcess] = []
        self._signum: int | None = None

    def run(self) -> int:
        try:
            for stages in ORDER:
                if self._signum is not None:
                    return exit_code_after(self._signum)
                if exit_code := self._run_side_by_side(stages):
                    return exit_code
            return 0
        finally:  # an error of this program must not leave stages behind
            self.pass_on(signal.SIGTERM)
            for each in self._running:
                each.process.wait()

    def pass_on(self, signum: int) -> None:
        """Pass a stop signal on. A terminal sends Ctrl-C to the stages, too; they count both as one."""
        self._signum = signum
        for each in self._running:
            each.stop(signum)

    def _run_side_by_side(self, stages: Sequence[Stage]) -> int:
        for stage in stages:
            self._running.append(_StageProcess(self._pipeline.command_of(stage), stage, self._view))
        codes: dict[Stage, int] = {}
        while len(codes) < len(stages):
            time.sleep(POLL_SECONDS)
            for each in self._running:
                if self._signum is not None and not each.was_signalled:  # it started while the signal came
                    each.stop(self._signum)
                if each.stage not in codes and each.process.poll() is not None:
                    codes[each.stage] = each.finish()
        self._running = []
        failed = [code for stage in stages if (code := codes[stage])]
        if failed and self._signum is not None and {*failed} <= {EXIT_AGAIN, EXIT_INTERRUPTED}:
            return exit_code_after(self._signum)
        return failed[0] if failed else 0


class _StageProcess:
    """A running program of a stage."""

    def __init__(self, command: Sequence[str], stage: Stage, view: PipelineView) -> None:
        self.stage, self._view = stage, view
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.was_signalled = False
        """Whether the stage was sent a stop signal."""
        changes = {"PYTHONUNBUFFERED": "1"} | ({PROGRESS_SECONDS_VARIABLE: PROGRESS_SECONDS} if view.is_live else {})
        self.process = subprocess.Popen(
            command,
            env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | changes,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        )
        view.begin(stage)
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._copy, args=each, daemon=True) for each in streams]
        for reader in self._readers:
            reader.start()

    def stop(self, signum: int) -> None:
        self.was_signalled = True
        self.process.send_signal(signum)

    def finish(self) -> int:
        """Show the end of a program that has ended, and return its exit code; 75 where a signal killed it."""
        for reader in self._readers:
            reader.join(LAST_LINES_SECONDS)
        exit_code = resolve_exit_code(self.process.returncode)
        reason = find_error_line("".join(self._last_lines)) if exit_code and self._last_lines else ""
        self._view.end(self.stage, exit_code, reason)
        return exit_code

    def _copy(self, stream: IO[str], output: TextIO) -> None:
        for line in stream:
            self._last_lines.append(line)
            self._view.take_line(self.stage, line.rstrip("\n"), output)
