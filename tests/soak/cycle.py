"""Runs the cycles of a soak: a pipeline under faults in a root of its own, and the audit of what it leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.artifacts.__main__ import read_manifest
from services.common.recipe.derived import tokens_per_step
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Stage
from services.trainer.metrics.records import ATTEMPTS_FILE
from services.trainer.tests.runs import checkpoints
from tests.small import write_notes, write_small_recipe
from tests.soak.audit import (
    Finding,
    audit_artifacts,
    audit_misses,
    audit_steps,
    audit_weights,
    digest_state,
    find_orphans,
    read_losses,
)
from tests.soak.disk import Disk, mounted_disk
from tests.soak.injection import Injected, Injector
from tests.soak.plan import LONG_STEPS, SHORT_STEPS, Cycle
from tests.soak.stage_run import REPOSITORY, CommandEnd, StageRun

ROOT_MEGABYTES, SCRATCH_MEGABYTES = 256, 768
REFERENCE_FILE = "reference.json"


@dataclass(frozen=True)
class CycleResult:
    """Outcome of a cycle: its faults, the ends of its commands, and what the audit found."""

    cycle: Cycle
    seconds: float
    injected: Sequence[Injected]
    ends: Sequence[CommandEnd]
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Reference:
    """Results of an undisturbed run."""

    losses: Mapping[int, float]
    state: Mapping[str, str]
    corpus_digest: str


@contextmanager
def soaking(folder: Path) -> Iterator[Soak]:
    """Mount the disks of a soak below `folder`, and unmount them at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        mounted_disk(folder / "root", ROOT_MEGABYTES) as disk,
        mounted_disk(folder / "scratch", SCRATCH_MEGABYTES) as scratch,
    ):
        soak = Soak(folder, disk, scratch)
        try:
            yield soak
        finally:
            soak.injector.end_all()


@dataclass
class Soak:
    """The folders of a soak, and the undisturbed runs whose results its cycles must have."""

    folder: Path
    disk: Disk
    scratch: Disk
    injector: Injector = field(init=False)

    def __post_init__(self) -> None:
        self.injector = Injector(self.disk, self.scratch)
        self.recipe = self.folder / "small.toml"
        if not (self.folder / "notes").exists():
            write_notes(self.folder / "notes")
        write_small_recipe(self.recipe, str(self.folder / "notes"))
        self.logs = self.folder / time.strftime("logs-%Y%m%d-%H%M%S")

    def run_cycle(self, cycle: Cycle) -> CycleResult:
        """Run a pipeline under the cycle's faults, audit its root, and delete the root."""
        reference = self.reference_of(cycle.max_steps)
        began_at, logs, root = time.monotonic(), self.logs / f"cycle-{cycle.number:04d}", self.disk.folder / "fsx"
        logs.mkdir(parents=True)
        self._prepare_root(cycle, root)
        runs, findings = list[StageRun](), list[Finding]()
        for stage in cycle.stages:
            run = StageRun(
                stage=stage,
                root=root,
                options=lambda start, stage=stage: self._options(cycle, stage, root, start),  # type: ignore[misc]
                environment={"TMPDIR": str(self.scratch.folder)},
                scratch=self.scratch.folder,
                logs=logs,
                injector=self.injector,
                pending=list(cycle.faults_of(stage)),
            )
            runs.append(run)
            is_done = run.run()
            findings += run.findings
            if not is_done:
                break
        if is_done:
            findings += self._audit(cycle, root, reference)
        if findings:
            shutil.copytree(root, logs / "root", symlinks=True)
        shutil.rmtree(root)
        return CycleResult(
            cycle=cycle,
            seconds=time.monotonic() - began_at,
            injected=[each for run in runs for each in run.injected],
            ends=[end for run in runs for end in run.ends],
            findings=findings,
        )

    def reference_of(self, max_steps: int) -> Reference:
        """Return the results of the undisturbed run after `max_steps`, which later soaks in this folder use again."""
        results = self.folder / REFERENCE_FILE
        if not results.exists():
            results.write_text(json.dumps(self._make_references()), encoding="utf-8")
        found = json.loads(results.read_text(encoding="utf-8"))
        return Reference(
            losses={int(step): loss for step, loss in found["losses"].items() if int(step) <= max_steps},
            state=found["states"][str(max_steps)],
            corpus_digest=found["corpus_digest"],
        )

    def _make_references(self) -> dict[str, Any]:
        """Make the undisturbed runs of both lengths; the longer one continues the shorter one."""
        for kind in ("run", "checkpoint"):  # of a soak that was ended before it had both lengths
            shutil.rmtree(self._base / kind, ignore_errors=True)
        for stage in ("tokenizer", "compiler"):
            self._call(stage, "--root", str(self._base))
        states = {}
        for steps in (SHORT_STEPS, LONG_STEPS):
            self._call("trainer", "--root", str(self._base), *self._training(steps), "--launch=inline")
            states[steps] = digest_state(list(checkpoints(self._base).values())[-1])
        (metrics,) = self._base.glob("run/*/metrics.jsonl")
        (corpus,) = self._base.glob("corpus/*/*/manifest.json")
        digest = read_manifest(corpus.parent).content_digest
        return {"losses": read_losses(metrics), "states": states, "corpus_digest": digest}

    @property
    def _base(self) -> Path:
        return self.folder / "reference"

    def _audit(self, cycle: Cycle, root: Path, reference: Reference) -> list[Finding]:
        findings = find_orphans(root) + audit_artifacts(root)
        recipe = load_recipe(self.recipe, {})
        (metrics,) = root.glob("run/*/metrics.jsonl")
        findings += audit_steps(metrics, reference.losses, tokens_per_step(recipe))
        findings += audit_misses(metrics.with_name(ATTEMPTS_FILE))
        findings += audit_weights(list(checkpoints(root).values())[-1], reference.state)
        for manifest in root.glob("corpus/*/*/manifest.json"):
            digest = read_manifest(manifest.parent).content_digest
            if digest != reference.corpus_digest:
                findings.append(
                    Finding("another corpus", f"digest {digest}, expected {reference.corpus_digest}", manifest)
                )
        return findings

    def _prepare_root(self, cycle: Cycle, root: Path) -> None:
        root.mkdir()
        for kind, is_wanted in (("corpus", cycle.has_corpus), ("compile_cache", cycle.has_cache)):
            if is_wanted:
                shutil.copytree(self._base / kind, root / kind)

    def _options(self, cycle: Cycle, stage: Stage, root: Path, start: int) -> list[str]:
        options = ["--recipe", str(self.recipe), "--root", str(root)]
        if stage != "trainer":
            return options
        workers = cycle.workers[min(start, len(cycle.workers) - 1)]
        return [
            *options,
            *self._training(cycle.max_steps),
            f"--launch={cycle.launch}",
            f"--parallel.data_parallel_size={workers}",
            f"--parallel.zero_stage={cycle.zero_stages[min(start, len(cycle.zero_stages) - 1)]}",
        ]

    def _training(self, max_steps: int) -> list[str]:
        return [
            f"--train.max_steps={max_steps}",
            f"--optimizer.decay_steps={LONG_STEPS}",
            "--checkpoint.interval_steps=10",
            "--train.max_restarts=100",
        ]

    def _call(self, stage: str, *options: str) -> None:
        """Run a command without faults to its end with 0."""
        command = [sys.executable, "-m", f"services.{stage}", "--recipe", str(self.recipe), *options]
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the undisturbed {stage} ended with {done.returncode}:\n{done.stdout}")
