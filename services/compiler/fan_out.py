"""Compiles graphs as concurrent tasks: the largest first, with bounded retries, and one error for all failures."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.errors import DeviceError, WorkersLost
from services.common.hardware.instance_types import GIB
from services.common.launch.launcher import Launcher, LostTask, TaskDemand
from services.common.process.progress import show_progress
from services.common.recipe.schema import Compile
from services.compiler.modules import Module
from services.compiler.neuronx_cc import CompiledModule, CompileResult, CompileTask, compile_module, find_compiled

logger = logging.getLogger(__name__)

MEMORY_FACTOR = 2.0
"""Factor by which the next attempt's memory grows after a compilation was killed."""


@dataclass(frozen=True)
class _Failure:
    task: CompileTask
    reason: str
    log: str = ""
    is_lost: bool = False


def make_tasks(modules: Sequence[Module], compiled: Path, target: str, settings: Compile) -> list[CompileTask]:
    """Make one task per graph."""
    return [
        CompileTask(
            module=module,
            compiled=compiled,
            target=target,
            timeout_seconds=settings.task_timeout_seconds,
            num_cpus=settings.task_cpus,
            memory_gib=settings.task_memory_gib,
        )
        for module in modules
    ]


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
        self._failures: list[_Failure] = []
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

    def _end(self, task: CompileTask, result: CompileResult | LostTask) -> int:
        """Record a task's result or queue its next attempt; returns the graph's bytes if the graph is done, else 0."""
        self._running -= 1
        if isinstance(result, CompileResult) and result.record:
            self._records[task.module.path] = result.record
            return task.module.graph_bytes
        failure = _failure_of(task, result)
        again = _next_attempt(task, result, self._settings.task_attempts)
        if again is not None and (again.memory_gib == task.memory_gib or self._launcher.has_room(_demand_of(again))):
            logger.warning(
                "%s: %s; starting attempt %d of %d with %g GiB",
                *(task.module.name, failure.reason, again.attempt, self._settings.task_attempts, again.memory_gib),
            )
            self._put(again)
            return 0
        if again is not None:
            failure = replace(
                failure, reason=f"{failure.reason}, and no node has {again.memory_gib:g} GiB for the next attempt"
            )
        logger.error("%s: %s", task.module.name, failure.reason)
        self._failures.append(failure)
        return task.module.graph_bytes

    def _describe(self) -> str:
        failed = f", {len(self._failures)} failed" if self._failures else ""
        return f"{len(self._records)} of {len(self._tasks)} graphs done, {self._running} running{failed}"


def _demand_of(task: CompileTask) -> TaskDemand:
    return TaskDemand(task.num_cpus, int(task.memory_gib * GIB))


def _failure_of(task: CompileTask, result: CompileResult | LostTask) -> _Failure:
    if isinstance(result, LostTask):
        return _Failure(task, f"the task was lost: {result.reason}", is_lost=not result.is_out_of_memory)
    return _Failure(task, result.reason, result.log)


def _next_attempt(task: CompileTask, result: CompileResult | LostTask, attempts: int) -> CompileTask | None:
    """Return the task of the next attempt; None where no attempt is left, or another cannot help."""
    if task.attempt >= attempts or (isinstance(result, CompileResult) and result.outcome == "failed"):
        return None
    is_killed = result.is_out_of_memory if isinstance(result, LostTask) else result.outcome == "killed"
    memory_gib = task.memory_gib * MEMORY_FACTOR if is_killed else task.memory_gib
    return replace(task, attempt=task.attempt + 1, memory_gib=memory_gib)


def _explain(failures: Sequence[_Failure], num_compiled: int, num_tasks: int) -> Exception:
    """Make one error that names all failed graphs: `WorkersLost` if every task was lost, else `DeviceError`."""
    lines = []
    for failure in failures:
        task = failure.task
        log = "".join(f"\n    {line}" for line in failure.log.splitlines())
        where = f" The whole log is {task.log_path}; it ends:{log}" if log else ""
        size = f"{task.module.graph_bytes:,} bytes, attempt {task.attempt}"
        lines.append(f"  {task.module.name} ({size}): {failure.reason}.{where}")
    message = (
        f"{len(failures)} of {num_tasks} graphs did not compile, and nothing was published. The {num_compiled} that "
        f"did are kept: the same command compiles the rest.\n" + "\n".join(lines)
    )
    return WorkersLost(message) if all(failure.is_lost for failure in failures) else DeviceError(message)
