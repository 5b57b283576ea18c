"""Compiles graphs as concurrent tasks: the largest first, with bounded retries, and one error for all failures."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from services.common.errors import DeviceError, WorkersLost
from services.common.hardware.instance_types import GIB
from services.common.launch.launcher import Launcher, LostTask, TaskDemand
from services.common.process.progress import show_progress
from services.common.recipe.compilation import Compile
from services.compiler.modules import Module
from services.compiler.neuronx_cc import CompiledModule, CompileResult, CompileTask, compile_module, find_compiled

logger = logging.getLogger(__name__)

MEMORY_FACTOR = 2.0
"""Factor by which the next attempt's memory grows after a compilation was killed."""


def make_tasks(modules: Sequence[Module], compiled: Path, settings: Compile) -> list[CompileTask]:
    """Make one task per graph."""
    return [CompileTask(module, compiled, settings, settings.task_memory_gib) for module in modules]


def compile_modules(tasks: Sequence[CompileTask], launcher: Launcher, settings: Compile) -> list[CompiledModule]:
    """Compile the graphs that have no record yet, and return all records in the order of the tasks.

    Raises `DeviceError` that names all failed graphs once no task is left, or `WorkersLost` when tasks were only lost,
    too often. Compiled graphs stay, and the next command continues from them.
    """
    records = {task.module.path: record for task in tasks if (record := find_compiled(task))}
    missing = [task for task in tasks if task.module.path not in records]
    if records:
        logger.info("%d of %d graphs were compiled by an earlier command", len(records), len(tasks))
    if missing:
        records |= _FanOut(missing, launcher, settings).run()
    return [records[task.module.path] for task in tasks]


class _FanOut:
    """Queue of tasks, with the records of compiled graphs and the failures so far."""

    def __init__(self, tasks: Sequence[CompileTask], launcher: Launcher, settings: Compile) -> None:
        self._tasks, self._launcher, self._settings = tasks, launcher, settings
        self._waiting: list[tuple[int, str, CompileTask]] = []
        self._running = 0
        self._records: dict[str, CompiledModule] = {}
        self._failures: list[tuple[CompileTask, CompileResult]] = []
        for task in tasks:
            self._put(task)

    def run(self) -> dict[str, CompiledModule]:
        done_bytes = 0
        total_bytes = sum(task.module.graph_bytes for task in self._tasks)
        # Time left is estimated by bytes, not by graphs: the largest graphs come first and take longest.
        with (
            closing(self._launcher.run_tasks(compile_module, self._take, self._settings.num_workers)) as all_ended,
            show_progress("compile", total_bytes / 1e6, "MB of graphs") as progress,
        ):
            for ended in all_ended:
                if ended is not None:
                    done_bytes += self._end(*ended)
                progress.advance_to(done_bytes / 1e6, self._describe())
        if self._failures:
            raise _explain(self._failures, len(self._records), len(self._tasks))
        return self._records

    def _put(self, task: CompileTask) -> None:
        heapq.heappush(self._waiting, (-task.module.graph_bytes, task.module.path, task))

    def _take(self) -> tuple[CompileTask, TaskDemand] | None:
        if not self._waiting:
            return None
        task = heapq.heappop(self._waiting)[2]
        self._running += 1
        return task, _demand_of(task)

    def _end(self, task: CompileTask, ended: CompileResult | LostTask) -> int:
        """Record a task's result or queue its next attempt; returns the graph's bytes if the graph is done, else 0."""
        self._running -= 1
        result = _result_of_lost(ended) if isinstance(ended, LostTask) else ended
        if result.record:
            self._records[task.module.path] = result.record
            return task.module.graph_bytes
        attempts = self._settings.task_attempts
        if task.attempt < attempts and result.outcome != "failed":
            memory_gib = task.memory_gib * (MEMORY_FACTOR if result.outcome == "killed" else 1)
            again = replace(task, attempt=task.attempt + 1, memory_gib=memory_gib)
            if memory_gib == task.memory_gib or self._launcher.has_room(_demand_of(again)):
                logger.warning(
                    "%s: %s; starting attempt %d of %d with %g GiB",
                    *(task.module.name, result.reason, again.attempt, attempts, memory_gib),
                )
                self._put(again)
                return 0
            reason = f"{result.reason}, and no node has {memory_gib:g} GiB for the next attempt"
            result = replace(result, reason=reason)
        logger.error("%s: %s", task.module.name, result.reason)
        self._failures.append((task, result))
        return task.module.graph_bytes

    def _describe(self) -> str:
        failed = f", {len(self._failures)} failed" if self._failures else ""
        return f"{len(self._records)} of {len(self._tasks)} graphs done, {self._running} running{failed}"


def _demand_of(task: CompileTask) -> TaskDemand:
    return TaskDemand(task.settings.task_cpus, int(task.memory_gib * GIB))


def _result_of_lost(task: LostTask) -> CompileResult:
    return CompileResult("killed" if task.is_out_of_memory else "lost", f"the task was lost: {task.reason}")


def _explain(failures: Sequence[tuple[CompileTask, CompileResult]], num_compiled: int, num_tasks: int) -> Exception:
    """Make one error that names all failed graphs: `WorkersLost` if every task was lost, else `DeviceError`."""
    lines = []
    for task, failure in failures:
        log = "".join(f"\n    {line}" for line in failure.log.splitlines())
        where = f" The whole log is {task.log_path}; it ends:{log}" if log else ""
        size = f"{task.module.graph_bytes:,} bytes, attempt {task.attempt}"
        lines.append(f"  {task.module.name} ({size}): {failure.reason}.{where}")
    message = (
        f"{len(failures)} of {num_tasks} graphs did not compile, and nothing was published. The {num_compiled} that "
        f"did are kept: the same command compiles the rest.\n" + "\n".join(lines)
    )
    return WorkersLost(message) if all(failure.outcome == "lost" for _, failure in failures) else DeviceError(message)
