"""Runs a stage to its end as a scheduler does, starting it again after each fault that ended its command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.common.errors import EXIT_INTERRUPTED, StorageError, TryAgain
from services.common.recipe.schema import Stage
from services.trainer.metrics.records import read_last_step
from services.trainer.tests.runs import flip_a_bit
from tests.soak.audit import Finding, audit_output, explain_exit_code
from tests.soak.injection import Injected, Injector
from tests.soak.plan import Fault
from tests.soak.processes import MARK, Family, describe

REPOSITORY = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
LONGEST_SECONDS = 900.0
"""Seconds after which a command that has not ended counts as hanging."""
MOST_STARTS = 12
STARTED_AGAIN = (StorageError.exit_code, TryAgain.exit_code, EXIT_INTERRUPTED, -signal.SIGKILL)
"""Exit codes after which a scheduler, or a person who has freed the disk, starts the command again."""
KERNELS_PREFIX = "millrace-kernels"
"""Begin of the name of the folder with compiled kernels, which later commands use again."""
FLIP = "flip a bit of the newest checkpoint"


@dataclass
class CommandEnd:
    """The end of one start of a stage's command."""

    stage: Stage
    exit_code: int
    seconds: float
    log: Path
    faults: list[Injected]


@dataclass
class StageRun:
    """A stage of a cycle: its faults, its starts and its findings."""

    stage: Stage
    root: Path
    options: Callable[[int], Sequence[str]]
    """Options of the start with this number, beginning at 0."""
    environment: Mapping[str, str]
    scratch: Path
    logs: Path
    injector: Injector
    pending: list[Fault]
    ends: list[CommandEnd] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> bool:
        """Start the command until it ends with 0. Returns False where it does not get there."""
        for start in range(MOST_STARTS):
            end = self._start(start)
            self.ends.append(end)
            self._judge(end)
            self.injector.wait()
            if end.exit_code == 0:
                self._note_progress(is_done=True)
                return True
            if end.exit_code not in STARTED_AGAIN:
                return False
            self._flip_checkpoint()
        self.findings.append(Finding("the stage does not get to its end", f"{MOST_STARTS} starts", self.logs))
        return False

    def last_step(self) -> int:
        """Return the last recorded step of the root's only run; 0 before it."""
        records = [record for run in self.root.glob("run/*/") if (record := read_last_step(run))]
        return max((record["step"] for record in records), default=0)

    def _start(self, start: int) -> CommandEnd:
        log = self.logs / f"{self.stage}-{start}.log"
        began_at, begin_step = time.monotonic(), self.last_step()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"services.{self.stage}", *self.options(start)],
                cwd=REPOSITORY,
                env={**os.environ, **self.environment, MARK: str(log)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        command = psutil.Process(process.pid)
        family, met = Family(command, str(log)), list[Injected]()
        self.injector.begin_command()
        seen_at = 0.0
        while process.poll() is None:
            seconds = time.monotonic() - began_at
            self.injector.end_due()
            if seconds - seen_at >= LOOK_SECONDS:
                seen_at = seconds
                family.look()
                self._note_progress()
            if due := self._find_due(start, seconds, begin_step):
                step, at = self.last_step(), time.monotonic()
                if target := self.injector.inject(due, command, family):
                    self.pending.remove(due)
                    met.append(Injected(due, at, target, step))
                    self.injected.append(met[-1])
            if seconds > LONGEST_SECONDS:
                self._end_hanging(process, log)
            time.sleep(POLL_SECONDS)
        self._note_progress()
        self.injector.end_of_command()
        left = family.wait_until_gone()
        for each in left:
            detail = f"pid {each.pid}: {describe(each)[:200]}"
            self.findings.append(Finding("a process outlives its command", detail, log))
            with suppress(psutil.Error):
                each.kill()
        if met and process.returncode:
            met[-1].outcome = f"exit code {process.returncode}" if process.returncode > 0 else "the command was killed"
        return CommandEnd(self.stage, process.returncode, time.monotonic() - began_at, log, met)

    def _find_due(self, start: int, seconds: float, begin_step: int) -> Fault | None:
        step = self.last_step()
        for fault in self.pending:
            if fault.kind == FLIP:
                continue
            match fault.moment:
                case "start":
                    is_due = start >= fault.start and seconds >= fault.after_seconds
                case "step":
                    is_due = step > begin_step and step >= fault.step
                case "save":
                    is_due = step >= fault.step and any(self.root.glob("checkpoint/*/*.partial"))
            if is_due:
                return fault
        return None

    def _note_progress(self, is_done: bool = False) -> None:
        step = self.last_step()
        for each in self.injected:
            if each.recovery_seconds is None and (is_done or step > each.furthest_step):
                each.recovery_seconds = time.monotonic() - each.at

    def _judge(self, end: CommandEnd) -> None:
        kinds = {each.fault.kind for each in end.faults}
        if why := explain_exit_code(end.exit_code, kinds, self.injector.has_killed_command):
            self.findings.append(Finding("an exit code that is not documented", why, end.log))
        self.findings += audit_output(end.log)
        left = [path for path in self.scratch.glob("millrace-*") if not path.name.startswith(KERNELS_PREFIX)]
        if left and "kill everything at once" not in kinds:
            names = ", ".join(sorted(str(path) for path in left)[:5])
            self.findings.append(Finding("temporary files outlive their command", names, end.log))
        for path in left:
            shutil.rmtree(path, ignore_errors=True)

    def _end_hanging(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.findings.append(Finding("the command hangs", f"it has not ended in {LONGEST_SECONDS:.0f} s", log))
        self.injector.has_killed_command = True
        process.kill()
        process.wait()

    def _flip_checkpoint(self) -> None:
        """Flip a bit of the newest checkpoint, if this is due and the run has another one to continue from."""
        fault = next((fault for fault in self.pending if fault.kind == FLIP), None)
        published = sorted(self.root.glob("checkpoint/*/step-*[0-9]/manifest.json"))
        if fault and len(published) > 1:
            self.pending.remove(fault)
            files = sorted(published[-1].parent.glob("shard-*.safetensors"))
            path = files[int(fault.choice * len(files))]
            flip_a_bit(path)
            self.injected.append(Injected(fault, time.monotonic(), str(path), self.last_step()))
