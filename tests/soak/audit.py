"""Audits what a soak's pipeline has left: its steps, artifacts, files, exit codes and output."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Collection, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.__main__ import main as artifacts
from services.common.artifacts.__main__ import read_manifest
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import CURRENT
from services.common.errors import EXIT_INTERRUPTED, StorageError, TryAgain
from services.common.process.entry_point import exit_code_of
from services.common.process.telemetry import read_json_lines
from services.trainer.evaluation.records import EVALUATIONS_FILE
from services.trainer.job import RUN_FILE
from services.trainer.metrics.events import EVENTS_FILE
from services.trainer.metrics.records import ATTEMPTS_FILE, METRICS_FILE
from services.trainer.runs.run import REPORT_FILE
from tests.soak.plan import KILLS_OF_COMMAND

_IN_RUN_FOLDER = (
    *map(re.escape, (RUN_FILE, METRICS_FILE, EVALUATIONS_FILE, ATTEMPTS_FILE, EVENTS_FILE, REPORT_FILE)),
    *(
        r"commands/\d{5}\.json",
        r"logs/rank-\d{5}\.log",
        r"heartbeats/rank-\d{5}\.json",
        r"tensorboard/events\.out\.tfevents\..+",
    ),
)
"""Patterns of the files that the folder of a complete run may have."""


@dataclass(frozen=True)
class Finding:
    """Something that the audit found: what is wrong, the detail, and the place to inspect."""

    what: str
    detail: str
    place: Path

    def __str__(self) -> str:
        return f"{self.place}: {self.what}: {self.detail}"


def audit_steps(metrics: Path, expected: Mapping[int, float], tokens_per_step: int) -> list[Finding]:
    """Check that every step up to the last expected one was recorded, and had the batch of the undisturbed run.

    A loss is a function of the weights and of the batch, so that the same bits of every loss mean the same samples in
    the same order. Within one start of the workers each step follows the one before. A start may do steps again that a
    lost start had done after its checkpoint, with the same losses, but leaves none out. `expected` has the losses of
    the undisturbed run by step.
    """
    findings, before, furthest = [], 0, 0

    def add(what: str, detail: str) -> None:
        findings.append(Finding(what, detail, metrics))

    for record in filter(None, read_json_lines(metrics)):
        step, is_start = record["step"], record["is_first_of_process"]
        allowed = furthest + 1 if is_start else before + 1
        if step > allowed:
            add("samples were lost", f"step {step} follows step {before}")
        elif step < allowed and not is_start:
            add("samples were repeated", f"step {step} follows step {before} in the same process")
        if step in expected and record["loss"] != expected[step]:
            add("another loss", f"step {step} has {record['loss']!r}, expected {expected[step]!r}")
        if record["tokens"] != step * tokens_per_step:
            add("another number of tokens", f"step {step} has {record['tokens']}, expected {step * tokens_per_step}")
        before, furthest = step, max(furthest, step)
    if before != (last := max(expected)):
        add("samples were lost", f"the last step is {before}, expected {last}")
    return findings


def audit_misses(attempts: Path) -> list[Finding]:
    """Check that no start of the workers compiled a graph that the published compile cache should have."""
    return [
        Finding("a compile miss", f"{record['graphs_compiled']} graphs, {record['new_cache_files']} files", attempts)
        for record in read_json_lines(attempts)
        if record and (record["graphs_compiled"] or record["new_cache_files"])
    ]


def find_orphans(root: Path) -> list[Finding]:
    """Return the files and empty folders of a root that belong to no published artifact and to no run."""
    owned = set(root.glob(f"*/*/{CURRENT}"))
    for manifest in root.glob(f"*/*/*/{MANIFEST}"):
        owned |= {manifest, *(manifest.parent / entry.path for entry in read_manifest(manifest.parent).files)}
    orphans = []
    for folder, folders, files in os.walk(root):
        for path in [Path(folder, name) for name in files] or ([Path(folder)] if not folders else []):
            parts = path.relative_to(root).parts
            is_of_run = parts[:1] == ("run",) and re.fullmatch("|".join(_IN_RUN_FOLDER), "/".join(parts[2:]))
            if path not in owned and not is_of_run:
                orphans.append(Finding("an orphan", "it belongs to no artifact and to no run", path))
    return orphans


def audit_artifacts(root: Path) -> list[Finding]:
    """Check with the command of operators that every artifact verifies, and that nothing is left to be collected."""
    findings = []
    for command, expected in (("verify", "ok "), ("gc", "0 removed.")):
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            exit_code = exit_code_of(lambda words=[command, str(root)]: artifacts(words))  # type: ignore[misc]
        if exit_code or expected not in output.getvalue():
            findings.append(Finding(f"`{command}` finds something", output.getvalue().strip(), root))
    return findings


def explain_exit_code(exit_code: int, kinds: Collection[str]) -> str | None:
    """Return why a command with faults of these kinds should not have ended so; None for a documented end."""
    allowed = {0, TryAgain.exit_code} if kinds else {0}
    allowed |= {StorageError.exit_code for kind in kinds if kind.startswith("fill")}
    allowed |= {EXIT_INTERRUPTED for kind in kinds if kind == "SIGINT"}
    allowed |= {-signal.SIGKILL for kind in kinds if kind in KILLS_OF_COMMAND}
    if exit_code in allowed:
        return None
    faults = ", ".join(sorted(kinds)) or "no fault"
    return f"{exit_code} after {faults}, expected {' or '.join(map(str, sorted(allowed)))}"


def audit_output(log: Path) -> list[Finding]:
    """Check that a command has printed no traceback: every end that a fault can cause has a message."""
    text = log.read_text(encoding="utf-8", errors="replace")
    at = text.find("Traceback (most recent call last)")
    return [Finding("a traceback", text[max(0, at - 200) : at + 2_000].strip(), log)] if at >= 0 else []
