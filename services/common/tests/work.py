"""Functions that tests run in tasks and workers, in a module that other processes can import."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from services.common.errors import ArtifactError
from services.common.launch.launcher import WorkerEnvironment
from services.common.recipe.schema import Recipe
from services.common.testing.artifacts import publish
from services.common.testing.operations import count_operations


def square(number: int) -> int:
    return number * number


def fail_or_block(number: int) -> int:
    """Fail in task 1 and block for ever in the others."""
    if number == 1:
        raise ArtifactError("task 1 found damage")
    threading.Event().wait()
    return number


def sleep(seconds: int) -> int:
    time.sleep(seconds)
    return 0


def process_id(number: int) -> int:
    return os.getpid()


def die_or_square(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(number)


def die_once_or_square(task: tuple[int, Path]) -> int:
    """Kill task 1 the first time, and mark that in the folder."""
    number, folder = task
    mark = folder / "died"
    if number == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return square(number)


def write_rank(folder: Path, environment: WorkerEnvironment) -> None:
    """Make a file whose name has the worker's rank, the world size and the local rank."""
    (folder / f"{environment.rank}-of-{environment.world_size}-on-{environment.local_rank}").touch()


def die_in_two_starts(folder: Path, environment: WorkerEnvironment) -> None:
    """Form a group and leave a file; in the first two starts rank 1 kills itself before that."""
    from services.common.program.process_group import ProcessGroup  # noqa: PLC0415 - the other tests do without torch

    group = ProcessGroup.join(environment.rank, environment.world_size, environment.rendezvous)
    group.barrier()
    if environment.start_number < 2 and environment.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    (folder / f"rank-{environment.rank}-start-{environment.start_number}").touch()
    group.leave()


def write_environment(folder: Path, environment: WorkerEnvironment) -> None:
    """Write this worker's environment variables."""
    (folder / f"{environment.rank}.json").write_text(json.dumps(dict(os.environ)), encoding="utf-8")


def read_environments(folder: Path) -> list[Any]:
    """Return what `write_environment` wrote, in the order of ranks."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def write_node(folder: Path, environment: WorkerEnvironment) -> None:
    """Write the process id of the raylet of the Ray node on which this worker's agent was started."""
    (folder / f"rank-{environment.rank}").write_text(os.environ["RAY_RAYLET_PID"], encoding="utf-8")


def name_node(number: int) -> str:
    """Return the id of this task's Ray node after a moment, so that several tasks run at the same time."""
    time.sleep(0.2)
    return _ray_node()


def _ray_node() -> str:
    import ray  # noqa: PLC0415 - the other tests do without it

    return str(ray.get_runtime_context().get_node_id())


def raise_on_last_rank(message: str, environment: WorkerEnvironment) -> None:
    if environment.rank == environment.world_size - 1:
        raise ArtifactError(message)
    threading.Event().wait()


def fail_with_a_bug(argument: None, environment: WorkerEnvironment) -> None:
    raise KeyError("bug")


def die_on_last_rank(argument: None, environment: WorkerEnvironment) -> None:
    if environment.rank == environment.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def block(folder: Path, environment: WorkerEnvironment) -> None:
    (folder / f"pid-{os.getpid()}").touch()
    threading.Event().wait()


def publish_and_die(root: Path, recipe: Recipe, fatal_operation: int) -> None:
    """Publish in a process that kills itself before its n-th operation on the file system below `root`.

    If it does not die, it exits with the number of operations.
    """
    operations = count_operations(root, fatal_operation)
    publish(root, recipe)
    os._exit(len(operations))
