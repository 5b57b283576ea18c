"""Checks all requirements of a run before it begins: `doctor` prints one table with the next steps.

It publishes nothing and takes no lock, so it may run beside a command that trains. One task checks each node, and the
nodes share the files of the corpus and of the compile cache. The command itself checks checkpoints and run folders.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import Level, total_bytes
from services.common.artifacts.lock import find_holder
from services.common.artifacts.store import Artifact
from services.common.artifacts.upstream import open_corpus, stage_command
from services.common.artifacts.verification import verify_on_nodes
from services.common.errors import ArtifactError, DeviceError, StorageError, TryAgain, UnreadableError
from services.common.input.files import is_damage
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import LostTask, choose_launcher
from services.common.process.command_line import RecipeParser
from services.common.process.progress import show_progress
from services.common.program.fingerprint import program_facts
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.branch import open_parent, require_same_vocabulary
from services.trainer.checkpoints.lookup import all_damaged, open_checkpoint, verify_sizes, verify_state
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.command_inputs import new_job, open_cache
from services.trainer.corpus import describe_corpus
from services.trainer.inspection.file_system import existing_place
from services.trainer.inspection.findings import (
    Finding,
    exit_code,
    format_table,
    look_at,
    merge_nodes,
    ok,
    problem,
    show_size,
    summarize,
    terminal_width,
    warning,
)
from services.trainer.inspection.fit import require_fit
from services.trainer.inspection.node_inspection import NodeQuestion, NodeView, look_at_node, read_clock
from services.trainer.job import ALLOW_CHANGED_PROGRAM, Job, continue_run
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.stop import STOP_FILE

CLOCK_READINGS = 3
SKEW_SECONDS = 1.0
"""Largest difference in seconds between the clocks of nodes, besides the uncertainty of reading them. Amazon's time
service keeps clocks within milliseconds.
"""
STRAGGLER = 0.1
"""Share by which a node's matrix products may be slower than the median node's. In every step all nodes wait for the
slowest.
"""


@dataclass
class _Found:
    """Results that later checks use."""

    corpus: Artifact[CorpusManifest] | None = None
    cache: Artifact[CompileCacheManifest] | None = None
    program: str = ""
    checkpoints: int = 0
    """Number of the run's checkpoints."""


def doctor_parser() -> RecipeParser:
    parser = RecipeParser("trainer doctor", "Check all requirements of a run and print the next steps.")
    parser.add_argument("--corpus", type=Path, help="corpus folder (default: the newest of this recipe)")
    parser.add_argument("--cache", type=Path, help="compile cache folder (default: the cache of this program)")
    parser.add_argument("--quick", action="store_true", help="compare sizes of files instead of checksums")
    parser.add_launch()
    return parser


def doctor(arguments: Namespace, recipe: Recipe) -> int:
    """Print the table, and return 0 or the exit code of the most serious problem."""
    found = _Found()
    level: Level = "size" if arguments.quick else "full"
    findings = [
        *look_at("recipe", partial(_look_at_recipe, recipe), "python -m services.trainer plan"),
        *look_at("corpus", partial(_look_at_corpus, arguments, recipe, level, found), _make("tokenizer", arguments)),
        *look_at(
            "compile cache", partial(_look_at_cache, arguments, recipe, level, found), _make("compiler", arguments)
        ),
    ]
    if found.corpus:
        job = new_job(arguments.root, recipe, describe_corpus(found.corpus), found.cache, found.program)
        restore = "restore it from a copy, or move its folder away"
        findings += look_at("checkpoints", partial(_look_at_checkpoints, job, level, arguments, found), restore)
        findings += look_at("writer", partial(_look_at_writer, job), "wait for it, or check the mount")
        findings += look_at("run's folder", partial(_look_at_run_folder, job), "make it readable for this user")
    question = NodeQuestion(
        recipe=recipe,
        root=arguments.root,
        launch=arguments.launch,
        workers=_workers_on_node(recipe, arguments.launch),
        cache_bytes=total_bytes(found.cache.manifest.files) if found.cache else 0,
        checkpoints=found.checkpoints,
        shared=found.corpus.path if found.corpus else arguments.root if os.access(arguments.root, os.F_OK) else None,
    )
    cluster = "python -m services.trainer doctor with --launch inline checks this machine only"
    findings += look_at("nodes", partial(_look_at_nodes, arguments.launch, question), cluster)
    print(format_table(findings, terminal_width()))
    print(f"\n{recipe.name} in {arguments.root}: {summarize(findings)}")
    return exit_code(findings)


def _make(stage: Any, arguments: Namespace) -> str:
    return stage_command(stage, arguments.recipe, arguments.root)


def _workers_on_node(recipe: Recipe, launch: str) -> int:
    is_cluster = launch == "ray" and cluster_address() is not None
    return min(recipe.parallel.num_workers, recipe.cluster.trainer_workers_per_node if is_cluster else 2**31)


def _look_at_recipe(recipe: Recipe) -> Iterator[Finding]:
    require_fit(recipe)
    parallel = recipe.parallel
    yield ok(
        "recipe",
        f"{recipe.name}: {recipe.model.num_parameters:,} parameters, {parallel.num_workers} workers of "
        f"{parallel.threads_per_worker} threads, {recipe.train.max_steps:,} steps",
    )


def _look_at_corpus(arguments: Namespace, recipe: Recipe, level: Level, found: _Found) -> Iterator[Finding]:
    found.corpus = open_corpus(recipe, arguments.recipe, arguments.root, arguments.corpus)
    yield _verify("corpus", found.corpus, level, arguments, _make("tokenizer", arguments))


def _look_at_cache(arguments: Namespace, recipe: Recipe, level: Level, found: _Found) -> Iterator[Finding]:
    found.program = fingerprint(program_facts(recipe))  # needed even if there is no cache
    found.cache, _ = open_cache(recipe, arguments.recipe, arguments.root, arguments.cache, allow_cold=False)
    if found.cache is None:
        yield ok("compile cache", "none needed: compile.enabled = false")
    else:
        yield _verify("compile cache", found.cache, level, arguments, _make("compiler", arguments))


def _verify(check: str, artifact: Artifact[Any], level: Level, arguments: Namespace, command: str) -> Finding:
    """Verify an artifact's files on all nodes. Raises `UnreadableError` for a file that this user may not read."""
    files, done = artifact.manifest.files, 0
    with show_progress(f"verifying the {check}", total_bytes(files) / 1e6, "MB") as progress:

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress.advance_to(done / 1e6)

        try:
            verify_on_nodes(choose_launcher(arguments.launch), artifact.path, artifact.manifest, level, advance)
        except ArtifactError as error:
            if not is_damage(error):
                raise
            # A stage does not touch a published artifact, even if it is damaged.
            away = f"mv {artifact.path} {arguments.root / f'damaged-{artifact.manifest.id}'} && {command}"
            return problem(check, error, away)
    what = "checksums" if level == "full" else "sizes"
    seen = f"{artifact.path}: {what} of {len(files):,} files, {show_size(total_bytes(files))}, are as published"
    return ok(check, seen)


def _look_at_checkpoints(job: Job, level: Level, arguments: Namespace, found: _Found) -> Iterator[Finding]:
    """Verify the newest checkpoints until one is intact, and only the sizes of older ones."""
    collection, steps = job.checkpoint_collection, checkpoint_steps(job.checkpoint_collection)
    damages: dict[int, str] = {}
    newest = None
    for step in reversed(steps):
        try:
            verify = verify_state(job.recipe, job.corpus, level) if newest is None else verify_sizes
            opened = open_checkpoint(collection, step, verify)
            newest = newest or opened
        except UnreadableError:
            raise
        except ArtifactError as error:
            damages[step] = str(error)
    found.checkpoints = len(steps)
    if damages and newest is None:
        raise all_damaged(collection, list(damages.values()))
    for damage in damages.values():
        yield warning(
            "checkpoints", damage, "restore it from a copy if you need its steps: the run continues without it"
        )
    if newest is None:
        if job.recipe.train.initial_weights:
            none = ArtifactError(
                f"{job.run}: begins with imported weights (train.initial_weights), which are not imported yet"
            )
            command = stage_command("trainer", arguments.recipe, job.root, "import", "--from", "FOLDER")
            yield problem("checkpoints", none, command)
            return
        if branch := job.recipe.train.branch:
            parent = open_parent(job.root, branch)
            require_same_vocabulary(job.root, parent, job.recipe, job.corpus)
            yield _verify("parent", parent, level, arguments, f"python -m services.trainer runs --root {job.root}")
        yield ok("checkpoints", f"none of {job.run}: it begins at step {job.recipe.train.first_step}")
        return
    state, max_steps = newest.manifest.checkpoint, job.recipe.train.max_steps
    if state.step < max_steps and job.program_fingerprint:
        try:
            continue_run(job, newest, allow_changed_program=False)
        except ArtifactError as error:
            yield problem("checkpoints", error, f"train with {ALLOW_CHANGED_PROGRAM}, or with the program that made it")
            return
    goes_on = f"continues from step {state.step:,} of {max_steps:,}" if state.step < max_steps else "is complete"
    skipped = f", {state.skipped_steps:,} steps skipped so far" if state.skipped_steps else ""
    yield ok("checkpoints", f"{len(steps) - len(damages)} of {job.run}, which {goes_on}{skipped}")


def _look_at_writer(job: Job) -> Iterator[Finding]:
    if holder := find_holder(job.lock):
        yield warning("writer", f"{holder} trains this run", f"wait for it, or stop it: touch {_stop_file(job)}")
    else:
        yield ok("writer", "no command trains this run")


def _look_at_run_folder(job: Job) -> Iterator[Finding]:
    stop, check = _stop_file(job), "run's folder"
    folders = (job.run_folder, job.run_folder / "logs", job.checkpoint_collection)
    for place in dict.fromkeys(map(existing_place, folders)):
        if not os.access(place, os.W_OK | os.X_OK):
            seen = f"{place}: this user cannot write there, but the run must"
            if place.is_relative_to(job.root):
                advice = f"let user {os.getuid()} write there, with chown or chmod"
            else:
                advice = "pass a --root that this user can write"
            yield problem(check, StorageError(seen), advice)
    if os.path.lexists(stop):
        yield warning(check, f"{stop} exists: the run would stop after its first step", f"rm -r {stop}")
    attempts, metrics = read_attempts(job.run_folder), read_metrics(job.run_folder)
    starts = sum(record["is_first_of_process"] for record in metrics.lines)
    seen = f"{starts} starts of the workers, of which {len(attempts.lines)} were not killed"
    if attempts.unreadable or metrics.unreadable:
        damaged = f"{attempts.unreadable + metrics.unreadable:,} lines cannot be read"
        yield warning(check, f"{seen}; {damaged}", "nothing to do: these lines hold no training state and are skipped")
    else:
        yield ok(check, seen if starts else f"{job.run_folder}: no step was trained yet")


def _stop_file(job: Job) -> Path:
    return job.run_folder / STOP_FILE


def _look_at_nodes(launch: str, question: NodeQuestion) -> Iterator[Finding]:
    launcher = choose_launcher(launch)
    views: dict[str, NodeView] = {}
    for node, view in launcher.map_nodes(look_at_node, question):
        if isinstance(view, LostTask):
            yield problem("nodes", TryAgain(f"{node}: {view.reason}"), "check the node, then run doctor again")
        else:
            views[node] = view
    if not views:
        raise DeviceError("no node can take this stage's work")
    yield from merge_nodes({node: view.findings for node, view in sorted(views.items())})
    yield from _compare_programs(views)
    yield from _compare_speeds(views)
    if len(views) > 1:
        yield from look_at("clocks", partial(_look_at_clocks, launch), "start the time service of the nodes")
    else:
        yield ok("clocks", "one machine, so one clock")


def _compare_programs(views: dict[str, NodeView]) -> Iterator[Finding]:
    programs = {node: view.fingerprint for node, view in views.items() if view.fingerprint}
    if len(set(programs.values())) > 1:
        most = statistics.mode(programs.values())
        others = ", ".join(sorted(node for node, program in programs.items() if program != most))
        yield problem(
            "programs",
            DeviceError(f"a run would refuse nodes with another CPU, torch, Python or compiler: {others}"),
            "make all nodes of the stage the same instance type and image",
        )


def _compare_speeds(views: dict[str, NodeView]) -> Iterator[Finding]:
    speeds = {node: view.gemm_flops_per_second for node, view in views.items() if view.gemm_flops_per_second}
    if not speeds:
        return
    median = statistics.median_high(speeds.values())  # of two nodes, the faster one
    slow = {node: speed for node, speed in speeds.items() if speed < (1 - STRAGGLER) * median}
    if slow:
        listed = ", ".join(f"{node} {speed / 1e9:,.0f} GFLOP/s" for node, speed in sorted(slow.items()))
        yield warning(
            "stragglers",
            f"the median node does {median / 1e9:,.0f} GFLOP/s; slower by a tenth or more: {listed}",
            "find other processes there, or drain these nodes: in every step all nodes wait for the slowest",
        )


def _look_at_clocks(launch: str) -> Iterator[Finding]:
    """Compare the nodes' clocks. No decision depends on them, but logs, metrics and TLS do."""
    readings: dict[str, tuple[float, float]] = {}
    for _ in range(CLOCK_READINGS):
        began = time.time()
        for node, reading in choose_launcher(launch).map_nodes(read_clock, None):
            if isinstance(reading, LostTask):
                continue
            ended = time.time()
            uncertain = (ended - began) / 2
            if node not in readings or uncertain < readings[node][1]:
                readings[node] = (reading - (began + ended) / 2, uncertain)
    if not readings:
        raise TryAgain("no node reported its time")
    offsets = [offset for offset, _ in readings.values()]
    uncertain = max(each for _, each in readings.values())
    middle = statistics.median(offsets)
    wrong = {
        node: offset - middle
        for node, (offset, _) in readings.items()
        if abs(offset - middle) > SKEW_SECONDS + uncertain
    }
    if wrong:
        named = ", ".join(f"{node} {offset:+.1f} s" for node, offset in sorted(wrong.items()))
        yield warning(
            "clocks", f"differ from the other nodes: {named}; logs, metrics and TLS use them", "start chrony there"
        )
    else:
        spread = max(offsets) - min(offsets)
        yield ok("clocks", f"{len(offsets)} nodes, {spread * 1000:.0f} ms apart, known to {uncertain * 1000:.0f} ms")
