"""`doctor` checks all requirements of a run before it starts, and prints one table with the next steps.

It publishes nothing and takes no lock, so it may run beside a command that trains. One task checks each node, and the
nodes share the files of the corpus and of the compile cache. The command itself checks checkpoints and run folder.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import Level, total_bytes
from services.common.artifacts.lock import find_holder
from services.common.artifacts.store import Artifact
from services.common.artifacts.upstream import open_corpus, stage_command
from services.common.artifacts.verification import verify_on_nodes
from services.common.errors import ArtifactError, DeviceError, StorageError, TryAgain, UnreadableError, is_damage
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import LostTask, choose_launcher
from services.common.process.command_line import Given
from services.common.process.progress import show_progress
from services.common.program.fingerprint import program_facts
from services.common.recipe.memory_estimate import show_size
from services.common.recipe.schema import fingerprint
from services.trainer.checkpoints.lookup import all_damaged, open_checkpoint, verify_sizes, verify_state
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.command_inputs import new_job, open_cache
from services.trainer.inspection.findings import (
    Finding,
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
from services.trainer.inspection.node import NodeReport, NodeRequirements, check_node, existing_place
from services.trainer.job import ALLOW_CHANGED_PROGRAM, Job, continue_run, describe_corpus
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


class Doctor:
    """Checks a run; later checks use what earlier ones have opened."""

    def __init__(
        self, given: Given, launch: str, corpus_path: Path | None, cache_path: Path | None, level: Level
    ) -> None:
        self._recipe, self._recipe_path, self._root = given.recipe, given.recipe_path, given.root
        self._corpus_path, self._cache_path = corpus_path, cache_path
        self._launch, self._launcher, self._level = launch, choose_launcher(launch), level
        self._corpus: Artifact[CorpusManifest] | None = None
        self._cache: Artifact[CompileCacheManifest] | None = None
        self._program, self._num_checkpoints = "", 0

    def check(self) -> list[Finding]:
        findings = [
            *run_check("recipe", self._check_recipe, "python -m services.trainer plan"),
            *run_check("corpus", self._check_corpus, self._make("tokenizer")),
            *run_check("compile cache", self._check_cache, self._make("compiler")),
        ]
        if self._corpus:
            job = new_job(self._root, self._recipe, describe_corpus(self._corpus), self._cache, self._program)
            restore = "restore it from a copy, or move its folder away"
            findings += run_check("checkpoints", lambda: self._check_checkpoints(job), restore)
            findings += run_check("writer", lambda: check_writer(job), "wait for it, or check the mount")
            findings += run_check("run's folder", lambda: check_run_folder(job), "make it readable for this user")
        inline = "python -m services.trainer doctor with --launch inline checks this machine only"
        return findings + run_check("nodes", self._check_nodes, inline)

    def _make(self, stage: Any) -> str:
        return stage_command(stage, self._recipe_path, self._root)

    def _check_recipe(self) -> Iterator[Finding]:
        recipe, parallel = self._recipe, self._recipe.parallel
        require_fit(recipe)
        yield ok(
            "recipe",
            f"{recipe.name}: {recipe.model.num_parameters:,} parameters, {parallel.num_workers} workers of "
            f"{parallel.threads_per_worker} threads, {recipe.train.max_steps:,} steps",
        )

    def _check_corpus(self) -> Iterator[Finding]:
        self._corpus = open_corpus(self._recipe, self._recipe_path, self._root, self._corpus_path)
        yield self._verify("corpus", self._corpus, self._make("tokenizer"))

    def _check_cache(self) -> Iterator[Finding]:
        self._program = fingerprint(program_facts(self._recipe))  # needed even if there is no cache
        opened = open_cache(self._recipe, self._recipe_path, self._root, self._cache_path, allow_cold=False)
        self._cache = opened[0]
        if self._cache is None:
            yield ok("compile cache", "none needed: compile.enabled = false")
        else:
            yield self._verify("compile cache", self._cache, self._make("compiler"))

    def _verify(self, check: str, artifact: Artifact[Any], command: str) -> Finding:
        """Verify an artifact's files on all nodes. Raises `UnreadableError` for a file that this user may not read."""
        files, done = artifact.manifest.files, 0
        with show_progress(f"verifying the {check}", total_bytes(files) / 1e6, "MB") as progress:

            def advance(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                progress.advance_to(done / 1e6)

            try:
                verify_on_nodes(self._launcher, artifact.path, artifact.manifest, self._level, advance)
            except ArtifactError as error:
                if not is_damage(error):
                    raise
                # A stage does not touch a published artifact, even if it is damaged.
                away = f"mv {artifact.path} {self._root / f'damaged-{artifact.manifest.id}'} && {command}"
                return problem(check, error, away)
        what = "checksums" if self._level == "full" else "sizes"
        size = show_size(total_bytes(files))
        return ok(check, f"{artifact.path}: {what} of {len(files):,} files, {size}, are as published")

    def _check_checkpoints(self, job: Job) -> Iterator[Finding]:
        """Verify the newest checkpoints until one is intact, and only the sizes of older ones."""
        check, collection, max_steps = "checkpoints", job.checkpoint_collection, job.recipe.train.max_steps
        steps, damages, newest = checkpoint_steps(collection), list[str](), None
        for step in reversed(steps):
            verify = verify_state(job.recipe, job.corpus, self._level) if newest is None else verify_sizes
            try:
                opened = open_checkpoint(collection, step, verify)
                newest = newest or opened
            except UnreadableError:
                raise
            except ArtifactError as error:
                damages.append(str(error))
        self._num_checkpoints = len(steps)
        if newest is None:
            if damages:
                raise all_damaged(collection, damages)
            yield from self._check_start(job)
            return
        for damage in damages:
            yield warning(check, damage, "restore it from a copy if you need its steps: the run continues without it")
        state = newest.manifest.checkpoint
        if state.step < max_steps and job.program_fingerprint:
            try:
                continue_run(job, newest, allow_changed_program=False)
            except ArtifactError as error:
                yield problem(check, error, f"train with {ALLOW_CHANGED_PROGRAM}, or with the program that made it")
                return
        goes_on = f"continues from step {state.step:,} of {max_steps:,}" if state.step < max_steps else "is complete"
        yield ok(check, f"{len(steps) - len(damages)} of {job.run}, which {goes_on}")

    def _check_start(self, job: Job) -> Iterator[Finding]:
        """Check what a run without a checkpoint starts from."""
        check, train = "checkpoints", job.recipe.train
        if train.initial_weights:
            none = ArtifactError(f"{job.run}: its weights (train.initial_weights) are not imported yet")
            command = stage_command("trainer", self._recipe_path, job.root, "import", "--from", "FOLDER")
            yield problem(check, none, command)
            return
        if train.branch:
            parent = open_parent(job.root, train.branch)
            require_same_vocabulary(job.root, parent, job.recipe, job.corpus)
            yield self._verify("parent", parent, f"python -m services.trainer runs --root {job.root}")
        yield ok(check, f"none of {job.run}: it starts at step {train.first_step}")

    def _check_nodes(self) -> Iterator[Finding]:
        recipe, launch, root = self._recipe, self._launch, self._root
        is_cluster = launch == "ray" and cluster_address() is not None
        on_node = recipe.cluster.trainer_workers_per_node if is_cluster else recipe.parallel.num_workers
        requirements = NodeRequirements(
            recipe=recipe,
            root=root,
            launch=launch,
            workers=min(recipe.parallel.num_workers, on_node),
            cache_bytes=total_bytes(self._cache.manifest.files) if self._cache else 0,
            checkpoints=self._num_checkpoints,
            shared=self._corpus.path if self._corpus else root if os.access(root, os.F_OK) else None,
        )
        reports: dict[str, NodeReport] = {}
        for node, report in self._launcher.map_nodes(check_node, requirements):
            if isinstance(report, LostTask):
                yield problem("nodes", TryAgain(f"{node}: {report.reason}"), "check the node, then run doctor again")
            else:
                reports[node] = report
        if not reports:
            raise DeviceError("no node can take this stage's work")
        yield from merge_nodes({node: report.findings for node, report in sorted(reports.items())})
        yield from compare_nodes(reports)


def check_writer(job: Job) -> Iterator[Finding]:
    """Find a command that trains the run."""
    if holder := find_holder(job.lock):
        stop = job.run_folder / STOP_FILE
        yield warning("writer", f"{holder} trains this run", f"wait for it, or stop it: touch {stop}")
    else:
        yield ok("writer", "no command trains this run")


def check_run_folder(job: Job) -> Iterator[Finding]:
    """Check that the run can write into its folders, and that no stop file waits for it."""
    check, stop = "run's folder", job.run_folder / STOP_FILE
    folders = (job.run_folder, job.run_folder / "logs", job.checkpoint_collection)
    closed = [place for place in dict.fromkeys(map(existing_place, folders)) if not os.access(place, os.W_OK | os.X_OK)]
    for place in closed:
        seen = StorageError(f"{place}: user {os.getuid()} cannot write there, but the run must")
        yield problem(check, seen, "change its owner or mode, or pass another --root")
    if stop.exists():
        yield warning(check, f"{stop} exists: the run would stop after its first step", f"rm {stop}")
    elif not closed:
        yield ok(check, f"{job.run_folder}")


def compare_nodes(reports: dict[str, NodeReport]) -> Iterator[Finding]:
    """Find nodes that run another program than most, or are slower."""
    programs = {node: report.fingerprint for node, report in reports.items() if report.fingerprint}
    if len(set(programs.values())) > 1:
        usual = statistics.mode(programs.values())
        others = ", ".join(sorted(node for node, program in programs.items() if program != usual))
        error = DeviceError(f"a run would refuse nodes with another CPU, torch, Python or compiler: {others}")
        yield problem("programs", error, "make all nodes of the stage the same instance type and image")
    speeds = {node: report.gemm_flops_per_second for node, report in reports.items() if report.gemm_flops_per_second}
    median = statistics.median_high(speeds.values()) if speeds else 0.0  # of two nodes, the faster one
    slow = {node: speed for node, speed in speeds.items() if speed < (1 - STRAGGLER) * median}
    if slow:
        listed = ", ".join(f"{node} {speed / 1e9:,.0f} GFLOP/s" for node, speed in sorted(slow.items()))
        seen = f"the median node does {median / 1e9:,.0f} GFLOP/s; slower by a tenth or more: {listed}"
        yield warning("stragglers", seen, "find other processes there, or drain these nodes")
