"""Runs the cycles of a soak: a pipeline under faults in a root of its own, and the audit of what it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from services.common.artifacts.__main__ import read_manifest
from services.common.errors import EXIT_INTERRUPTED, StorageError, TryAgain
from services.common.recipe.derived import tokens_per_step
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.commands import run_python
from services.trainer.metrics.records import ATTEMPTS_FILE, read_last_step
from services.trainer.tests.runs import (
    REPOSITORY,
    checkpoints,
    command_line_of,
    flip_a_bit,
    read_run,
    state_hash,
)
from tests.small import write_notes, write_small_recipe
from tests.soak.audit import (
    Finding,
    audit_artifacts,
    audit_misses,
    audit_output,
    audit_steps,
    explain_exit_code,
    find_orphans,
)
from tests.soak.faults import MARK, Injector, ProcessTree, mounted_disk
from tests.soak.plan import FLIP, KILLS_OF_COMMAND, MAX_STEPS, Cycle, Fault

ROOT_MEGABYTES, SCRATCH_MEGABYTES = 256, 768
ARTIFACT_OF = {"tokenizer": "corpus", "compiler": "compile_cache"}
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
MAX_SECONDS = 900.0
"""Seconds after which a command that has not ended counts as hanging."""
MAX_STARTS = 12
STARTED_AGAIN = (StorageError.exit_code, TryAgain.exit_code, EXIT_INTERRUPTED, -signal.SIGKILL)
"""Exit codes after which a scheduler, or a person who has freed the disk, starts the command again."""
KERNELS_PREFIX = "millrace-kernels"
"""Prefix of the folder with compiled kernels, which later commands use again."""


@dataclass
class Injected:
    """A fault that has happened, and what came of it."""

    fault: Fault
    at: float
    """Time of the monotonic clock at which the fault began."""
    target: str
    furthest_step: int
    """Last recorded step of the run before the fault."""
    outcome: str = "the command went on"
    recovery_seconds: float | None = None
    """Seconds from the fault's beginning to a step beyond `furthest_step`, or to the stage's end."""


@dataclass
class StageRun:
    """A stage of a cycle: its faults, its starts and its findings."""

    stage: Stage
    root: Path
    options: Callable[[int], Sequence[str]]
    """Options of the start with this number, beginning at 0."""
    scratch: Path
    """Folder for temporary files."""
    logs: Path
    injector: Injector
    pending: list[Fault]
    exit_codes: list[int] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> bool:
        """Start the command until it ends with 0. Returns False where it does not get there."""
        for start in range(MAX_STARTS):
            exit_code = self._run_command(start)
            self.exit_codes.append(exit_code)
            if exit_code == 0:
                self._note_progress(is_done=True)
                return True
            if exit_code not in STARTED_AGAIN:
                return False
            self._flip_checkpoint()
        self._add("the stage does not get to its end", f"{MAX_STARTS} starts", self.logs)
        return False

    def _run_command(self, start: int) -> int:
        """Run the command once under its faults, and audit its end; returns its exit code."""
        log = self.logs / f"{self.stage}-{start}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"services.{self.stage}", *self.options(start)],
                cwd=REPOSITORY,
                env={**os.environ, "TMPDIR": str(self.scratch), MARK: str(log)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        tree, before = ProcessTree(psutil.Process(process.pid), str(log)), len(self.injected)
        self._inject_until_end(process, tree, start, log)
        self._note_progress()
        self.injector.wait()
        met = self.injected[before:]
        if met and process.returncode:
            met[-1].outcome = f"exit code {process.returncode}" if process.returncode > 0 else "the command was killed"
        for left in tree.wait_until_gone():
            self._add("a process outlives its command", f"pid {left.pid}: {command_line_of(left)[:200]}", log)
            with suppress(psutil.Error):
                left.kill()
        self._audit_end(process.returncode, {each.fault.kind for each in met}, log)
        return process.returncode

    def _inject_until_end(self, process: subprocess.Popen[bytes], tree: ProcessTree, start: int, log: Path) -> None:
        began_at, first_step, seen_at = time.monotonic(), self._last_step(), 0.0
        while process.poll() is None:
            seconds = time.monotonic() - began_at
            self.injector.end_due()
            if seconds - seen_at >= LOOK_SECONDS:
                seen_at = seconds
                tree.list_others()
                self._note_progress()
            if due := self._find_due(start, seconds, first_step):
                step, at = self._last_step(), time.monotonic()
                if target := self.injector.inject(due, tree):
                    self.pending.remove(due)
                    self.injected.append(Injected(due, at, target, step))
            if seconds > MAX_SECONDS:
                self._add("the command hangs", f"it has not ended in {MAX_SECONDS:.0f} s", log)
                process.kill()
                process.wait()
            time.sleep(POLL_SECONDS)

    def _find_due(self, start: int, seconds: float, first_step: int) -> Fault | None:
        step, is_saving = self._last_step(), any(self.root.glob("checkpoint/*/*.partial"))
        for fault in (fault for fault in self.pending if fault.kind != FLIP):
            is_due = {
                "start": start >= fault.start and seconds >= fault.after_seconds,
                "step": step > first_step and step >= fault.step,
                "save": step >= fault.step and is_saving,
            }
            if is_due[fault.moment]:
                return fault
        return None

    def _last_step(self) -> int:
        """Return the last recorded step of the root's only run; 0 before it."""
        records = [record for run in self.root.glob("run/*/") if (record := read_last_step(run))]
        return max((record["step"] for record in records), default=0)

    def _note_progress(self, is_done: bool = False) -> None:
        step = self._last_step()
        for each in self.injected:
            if each.recovery_seconds is None and (is_done or step > each.furthest_step):
                each.recovery_seconds = time.monotonic() - each.at

    def _audit_end(self, exit_code: int, kinds: set[str], log: Path) -> None:
        if why := explain_exit_code(exit_code, kinds):
            self._add("an exit code that is not documented", why, log)
        self.findings += audit_output(log)
        left = [path for path in self.scratch.glob("millrace-*") if not path.name.startswith(KERNELS_PREFIX)]
        if left and not kinds.intersection(KILLS_OF_COMMAND):
            self._add("temporary files outlive their command", ", ".join(sorted(map(str, left))[:5]), log)
        for path in left:
            shutil.rmtree(path, ignore_errors=True)

    def _flip_checkpoint(self) -> None:
        """Flip a bit of the newest checkpoint, if this is due and the run has another one to continue from."""
        fault = next((fault for fault in self.pending if fault.kind == FLIP), None)
        published = list(checkpoints(self.root).values())
        if fault and len(published) > 1:
            self.pending.remove(fault)
            files = sorted(published[-1].glob("shard-*.safetensors"))
            path = files[int(fault.choice * len(files))]
            flip_a_bit(path)
            self.injected.append(Injected(fault, time.monotonic(), str(path), self._last_step()))

    def _add(self, what: str, detail: str, place: Path) -> None:
        self.findings.append(Finding(what, detail, place))


@dataclass(frozen=True)
class CycleResult:
    """Outcome of a cycle: its stages with their faults and exit codes, and what the audit found."""

    cycle: Cycle
    seconds: float
    runs: list[StageRun]
    findings: list[Finding]


@contextmanager
def soaking(folder: Path) -> Iterator[Soak]:
    """Mount the disks of a soak below `folder`, and unmount them at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        mounted_disk(folder / "root", ROOT_MEGABYTES) as disk,
        mounted_disk(folder / "scratch", SCRATCH_MEGABYTES) as scratch,
    ):
        injector = Injector(disk, scratch)
        try:
            yield Soak(folder, disk.folder, scratch.folder, injector)
        finally:
            injector.end_due(is_all=True)


class Soak:
    """The folders of a soak, and the undisturbed run whose results its cycles must have."""

    def __init__(self, folder: Path, disk: Path, scratch: Path, injector: Injector) -> None:
        self.logs = folder / time.strftime("logs-%Y%m%d-%H%M%S")
        self._root, self._scratch, self._injector = disk / "fsx", scratch, injector
        self._reference = folder / "reference"
        if not (folder / "notes").exists():
            write_notes(folder / "notes")
        self._recipe = write_small_recipe(folder / "small.toml", str(folder / "notes"))
        self._run_undisturbed()

    def run_cycle(self, cycle: Cycle) -> CycleResult:
        """Run a pipeline under the cycle's faults, audit its root, and delete the root."""
        began_at, logs, runs = time.monotonic(), self.logs / f"cycle-{cycle.number:04d}", list[StageRun]()
        logs.mkdir(parents=True)
        self._root.mkdir()
        for stage, kind in ARTIFACT_OF.items():
            if stage not in cycle.stages:
                shutil.copytree(self._reference / kind, self._root / kind)
        is_done = True
        for stage in cycle.stages:
            if is_done:
                runs.append(self._make_run(cycle, stage, logs))
                is_done = runs[-1].run()
        findings = [finding for run in runs for finding in run.findings]
        findings += self._audit() if is_done else []
        if findings:
            shutil.copytree(self._root, logs / "root", symlinks=True)
        shutil.rmtree(self._root)
        return CycleResult(cycle, time.monotonic() - began_at, runs, findings)

    def _make_run(self, cycle: Cycle, stage: Stage, logs: Path) -> StageRun:
        def options_of(start: int) -> list[str]:
            workers, zero_stage = cycle.layouts[min(start, len(cycle.layouts) - 1)]
            layout = (f"--parallel.data_parallel_size={workers}", f"--parallel.zero_stage={zero_stage}")
            options = self._options(stage, self._root)
            return [*options, f"--launch={cycle.launch}", *layout] if stage == "trainer" else options

        faults = [fault for fault in cycle.faults if fault.stage == stage]
        return StageRun(stage, self._root, options_of, self._scratch, logs, self._injector, faults)

    def _audit(self) -> list[Finding]:
        """Compare what a cycle left with the undisturbed run."""
        root = self._root
        [metrics] = root.glob("run/*/metrics.jsonl")
        losses = {record["step"]: record["loss"] for record in read_run(self._reference).records}
        findings = find_orphans(root) + audit_artifacts(root)
        findings += audit_steps(metrics, losses, tokens_per_step(load_recipe(self._recipe)))
        findings += audit_misses(metrics.with_name(ATTEMPTS_FILE))
        for what, found, undisturbed in (
            ("other weights or moments", *map(_hash_of_state, (root, self._reference))),
            ("another corpus", *map(_digest_of_corpus, (root, self._reference))),
        ):
            if found != undisturbed:
                findings.append(Finding(what, f"digest {found}, expected {undisturbed}", root))
        return findings

    def _run_undisturbed(self) -> None:
        shutil.rmtree(self._reference, ignore_errors=True)
        for stage in STAGES:
            done = run_python(["-m", f"services.{stage}", *self._options(stage, self._reference)])
            if done.returncode:
                raise RuntimeError(f"the undisturbed {stage} ended with {done.returncode}:\n{done.stdout}")

    def _options(self, stage: Stage, root: Path) -> list[str]:
        options = ["--recipe", str(self._recipe), "--root", str(root)]
        if stage == "trainer":
            options += [f"--train.max_steps={MAX_STEPS}", f"--optimizer.decay_steps={MAX_STEPS}"]
            options += ["--checkpoint.interval_steps=10", "--train.max_restarts=100"]
        return options


def _hash_of_state(root: Path) -> str:
    return state_hash(list(checkpoints(root).values())[-1])


def _digest_of_corpus(root: Path) -> str:
    [manifest] = root.glob("corpus/*/*/manifest.json")
    return read_manifest(manifest.parent).content_digest
