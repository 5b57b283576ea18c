"""`doctor` checks all requirements of a run before it starts, and prints one table with the next steps.

It publishes nothing and takes no lock, so it may run beside a command that trains. One task checks each node, and the
nodes share the files of the corpus and of the compile cache. The command itself checks checkpoints and run folder.
"""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import Level, total_bytes
from services.common.artifacts.lock import find_holder
from services.common.artifacts.store import Artifact
from services.common.artifacts.upstream import open_corpora, stage_command
from services.common.artifacts.verification import verify_on_nodes
from services.common.errors import ArtifactError, DeviceError, StorageError, TryAgain, UnreadableError, is_damage
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import LostTask, choose_launcher
from services.common.process.command_line import Given
from services.common.process.progress import show_progress
from services.common.program.fingerprint import program_facts
from services.common.recipe.memory_estimate import show_size
from services.common.recipe.schema import fingerprint
from services.trainer.checkpoints.lookup import all_damaged, open_checkpoint, run_command, verify_sizes, verify_state
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.command_inputs import new_job, open_cache
from services.trainer.inspection.findings import (
    Finding,
    Result,
    exit_code,
    format_table,
    merge_nodes,
    ok,
    problem,
    run_check,
    summarize,
    warning,
)
from services.trainer.inspection.fit import require_fit
from services.trainer.inspection.node import NodeRequirements, check_node, existing_place
from services.trainer.job import ALLOW_CHANGED_PROGRAM, Job, describe_corpora, require_own_program
from services.trainer.runs.branch import open_parent, require_same_vocabulary
from services.trainer.supervision.stop import STOP_FILE

STRAGGLER = 0.1
"""Share by which a node's matrix products may be slower than the median node's: in every step all nodes wait for the
slowest.
"""


def doctor(given: Given, launch: str, corpus_path: Path | None, cache_path: Path | None, level: Level) -> int:
    """Print the table, and return 0 or the exit code of the most serious problem."""
    findings = Doctor(given, launch, corpus_path, cache_path, level).check()
    print(f"{format_table(findings)}\n\n{given.recipe.name} in {given.root}: {summarize(findings)}")
    return exit_code(findings)


@dataclass
class Doctor:
    """Checks a run; later checks use what earlier ones have opened."""

    given: Given
    launch: str
    corpus_path: Path | None
    cache_path: Path | None
    level: Level
    corpora: dict[str, Artifact[CorpusManifest]] = field(default_factory=dict)
    cache: Artifact[CompileCacheManifest] | None = None
    program: str = ""
    num_checkpoints: int = 0

    def check(self) -> list[Finding]:
        findings = [
            run_check("recipe", self._check_recipe, self._make("trainer", "plan")),
            run_check("corpus", self._check_corpus, self._make("tokenizer")),
            run_check("compile cache", self._check_cache, self._make("compiler")),
        ]
        if self.corpora:
            corpus = describe_corpora(self.given.recipe, self.corpora)
            job = new_job(self.given.root, self.given.recipe, corpus, self.cache, self.program)
            restore = "restore it from a copy, or move its folder away"
            findings += [
                run_check("checkpoints", lambda: self._check_checkpoints(job), restore),
                run_check("writer", lambda: check_writer(job), "wait for it, or check the mount"),
                run_check("run's folder", lambda: check_run_folder(job), "make it readable for this user"),
            ]
        return findings + self._check_nodes()

    def _make(self, stage: Any, *words: str) -> str:
        return stage_command(stage, self.given.recipe_path, self.given.root, *words)

    def _check_recipe(self) -> Finding:
        recipe, parallel = self.given.recipe, self.given.recipe.parallel
        require_fit(recipe)
        return ok(
            f"{recipe.name}: {recipe.model.num_parameters:,} parameters, {parallel.num_workers} workers of "
            f"{parallel.threads_per_worker} threads, {recipe.train.max_steps:,} steps"
        )

    def _check_corpus(self) -> Finding:
        given = self.given
        self.corpora = open_corpora(given.recipe, given.recipe_path, given.root, self.corpus_path)
        makers = [self._make("tokenizer"), *["the same with its own recipe"] * (len(self.corpora) - 1)]
        found = list(map(self._verify, self.corpora.values(), makers))
        intact = ok("\n".join(each.seen for each in found))
        return next((each for each in found if each.result is not Result.OK), intact)

    def _check_cache(self) -> Finding:
        try:
            self.program = fingerprint(program_facts(self.given.recipe))  # needed even if there is no cache
        except DeviceError as error:
            return problem(error, "see device")
        self.cache, _ = open_cache(
            self.given.recipe, self.given.recipe_path, self.given.root, self.cache_path, allow_cold=False
        )
        if self.cache is None:
            return ok("none needed: compile.enabled = false")
        return self._verify(self.cache, self._make("compiler"))

    def _verify(self, artifact: Artifact[Any], command: str) -> Finding:
        """Verify an artifact's files on all nodes. Raises `UnreadableError` for a file that this user may not read."""
        manifest, path = artifact.manifest, artifact.path
        size = total_bytes(manifest.files)
        with show_progress("verifying", size / 1e6, "MB") as progress:
            advance = lambda more: progress.advance_to(progress.measure().done + more / 1e6)  # noqa: E731
            try:
                verify_on_nodes(choose_launcher(self.launch), path, manifest, self.level, advance)
            except ArtifactError as error:
                if not is_damage(error):
                    raise
                # A stage does not touch a published artifact, even if it is damaged.
                move = shlex.join(["mv", str(path), str(self.given.root / f"damaged-{manifest.id}")])
                return problem(error, f"{move} && {command}")
        what = "checksums" if self.level == "full" else "sizes"
        return ok(f"{path}: {what} of {len(manifest.files):,} files, {show_size(size)}, are as published")

    def _check_checkpoints(self, job: Job) -> Finding:
        """Verify the newest checkpoints until one is intact, and only the sizes of older ones."""
        collection, max_steps = job.checkpoint_collection, job.recipe.train.max_steps
        steps, damages, newest = checkpoint_steps(collection), list[str](), None
        for step in reversed(steps):
            verify = verify_state(job.recipe, job.corpus, self.level) if newest is None else verify_sizes
            try:
                opened = open_checkpoint(collection, step, verify)
                newest = newest or opened
            except UnreadableError:
                raise
            except ArtifactError as error:
                damages.append(str(error))
        self.num_checkpoints = len(steps)
        if newest is None:
            if damages:
                raise all_damaged(collection, damages)
            return self._check_start(job)
        step = newest.manifest.checkpoint.step
        if step < max_steps and job.program_fingerprint:
            try:
                require_own_program(job, newest)
            except ArtifactError as error:
                return problem(error, f"train with {ALLOW_CHANGED_PROGRAM}, or with the program that made it")
        goes_on = f"continues from step {step:,} of {max_steps:,}" if step < max_steps else "is complete"
        seen = f"{len(steps) - len(damages)} of {job.run}, which {goes_on}"
        if damages:
            return warning("\n".join([seen, *damages]), "restore it from a copy if you need its steps")
        return ok(seen)

    def _check_start(self, job: Job) -> Finding:
        """Check what a run without a checkpoint starts from."""
        train = job.recipe.train
        if train.initial_weights:
            none = ArtifactError(f"{job.run}: its weights (train.initial_weights) are not imported yet")
            return problem(none, self._make("trainer", "import", "--from", "FOLDER"))
        if train.branch:
            parent = open_parent(job.root, train.branch)
            require_same_vocabulary(job.root, parent, job.recipe, job.corpus)
            verified = self._verify(parent, run_command(job.root, "runs"))
            if verified.result is not Result.OK:
                return verified
        return ok(f"none of {job.run}: it starts at step {train.first_step}")

    def _check_nodes(self) -> list[Finding]:
        recipe, launch, root = self.given.recipe, self.launch, self.given.root
        is_cluster = launch == "ray" and cluster_address() is not None
        on_node = recipe.cluster.trainer_workers_per_node if is_cluster else recipe.parallel.num_workers
        shared = next((corpus.path for corpus in self.corpora.values()), None)
        requirements = NodeRequirements(
            recipe=recipe,
            root=root,
            workers=min(recipe.parallel.num_workers, on_node),
            cache_bytes=total_bytes(self.cache.manifest.files) if self.cache else 0,
            checkpoints=self.num_checkpoints,
            shared=shared or (root if os.access(root, os.F_OK) else None),
        )
        found: dict[str, list[Finding]] = {}

        def check() -> Finding:
            lost = []
            for node, report in choose_launcher(self.launch).map_nodes(check_node, requirements):
                if isinstance(report, LostTask):
                    lost.append(f"{node}: {report.reason}")
                else:
                    found[node] = report
            if lost:
                raise TryAgain("\n".join(lost))
            if not found:
                raise DeviceError("no node can take this stage's work")
            return ok(f"checked: {len(found)}")

        inline = f"check them; {self._make('trainer', 'doctor', '--launch', 'inline')} checks this machine only"
        nodes = run_check("nodes", check, inline)
        ordered = dict(sorted(found.items()))
        return [nodes, *merge_nodes(ordered), *compare_nodes(ordered)]


def check_writer(job: Job) -> Finding:
    """Find a command that trains the run."""
    stop = shlex.quote(str(job.run_folder / STOP_FILE))
    if holder := find_holder(job.lock):
        return warning(f"{holder} trains this run", f"wait for it, or stop it: touch {stop}")
    return ok("no command trains this run")


def check_run_folder(job: Job) -> Finding:
    """Check that the run can write into its folders, and that no stop file waits for it."""
    stop = job.run_folder / STOP_FILE
    for folder in (job.run_folder, job.run_folder / "logs", job.checkpoint_collection):
        if not os.access(place := existing_place(folder), os.W_OK | os.X_OK):
            seen = StorageError(f"{place}: user {os.getuid()} cannot write there, but the run must")
            return problem(seen, "change its owner or mode, or pass another --root")
    if stop.exists():
        return warning(f"{stop} exists: the run would stop after its first step", f"rm {shlex.quote(str(stop))}")
    return ok(f"{job.run_folder}")


def compare_nodes(found: dict[str, list[Finding]]) -> Iterator[Finding]:
    """Find nodes that run another program than most, or are slower."""
    programs, speeds = (
        {node: each.compared for node, findings in found.items() for each in findings if each.check == check}
        for check in ("device", "matrix products")
    )
    usual = statistics.mode(filter(None, programs.values())) if any(programs.values()) else None
    if others := [node for node, program in programs.items() if program not in (usual, None)]:
        error = DeviceError(
            f"a run would refuse nodes with another CPU, torch, Python or compiler: {', '.join(others)}"
        )
        same = problem(error, "make all nodes of the stage the same instance type and image")
        yield replace(same, check="programs")
    measured = {node: float(speed) for node, speed in speeds.items() if speed}
    median = statistics.median_high(measured.values()) if measured else 0.0  # of two nodes, the faster one
    if slow := {node: speed for node, speed in measured.items() if speed < (1 - STRAGGLER) * median}:
        listed = ", ".join(f"{node} {speed / 1e9:,.0f} GFLOP/s" for node, speed in slow.items())
        seen = f"the median node does {median / 1e9:,.0f} GFLOP/s; slower by a tenth or more: {listed}"
        yield replace(warning(seen, "find other processes there, or drain these nodes"), check="stragglers")
