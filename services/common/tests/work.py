"""Functions that tests run in tasks and workers, in a module that other processes can import."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from services.common.errors import ArtifactError
from services.common.launch.launcher import WorkerEnvironment
from services.common.testing.waiting import wait_until


def square(number: int) -> int:
    return number * number


def fail_or_block(number: int) -> int:
    """Fail in task 1 and block for ever in the others."""
    if number == 1:
        raise ArtifactError("task 1 found damage")
    threading.Event().wait()
    return number


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


def write_place(folder: Path, environment: WorkerEnvironment) -> None:
    """Write the worker's local world size, node rank, number of nodes and node folder, which has to exist."""
    assert environment.node_folder is not None
    assert environment.node_folder.is_dir()
    place = [environment.local_world_size, environment.node_rank, environment.num_nodes, str(environment.node_folder)]
    (folder / f"{environment.rank}.json").write_text(json.dumps(place), encoding="utf-8")


def kill_parent(_: None, environment: WorkerEnvironment) -> None:
    if environment.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def kill_agent(folder: Path, environment: WorkerEnvironment) -> None:
    """Let the last of all workers kill the agent of its node once all have written their process ids."""
    (folder / f"pid-{os.getpid()}").touch()
    if environment.rank == environment.world_size - 1:
        wait_until(lambda: len(list(folder.glob("pid-*"))) == environment.world_size)
        agent = next(each for each in psutil.Process().parents() if "launch.agent_process" in " ".join(each.cmdline()))
        agent.kill()
    threading.Event().wait()


def kill_task_of_ray(_: None, environment: WorkerEnvironment) -> None:
    """Let the last of all workers kill the process of Ray that started the agent of its node."""
    if environment.rank == environment.world_size - 1:
        next(each for each in psutil.Process().parents() if "ray::run_agent" in " ".join(each.cmdline())).kill()
    threading.Event().wait()


def kill_process(pid: int, environment: WorkerEnvironment) -> None:
    """Let the first of all workers kill a process, and all of them wait."""
    if environment.rank == 0:
        os.kill(pid, signal.SIGKILL)
    threading.Event().wait()


def freeze_agent_and_die(_: None, environment: WorkerEnvironment) -> None:
    """Let the last of all workers freeze the agent of its node, and end."""
    if environment.rank == environment.world_size - 1:
        agent = next(each for each in psutil.Process().parents() if "launch.agent_process" in " ".join(each.cmdline()))
        agent.suspend()
        os._exit(1)
    threading.Event().wait()


def stop_itself() -> None:
    """Freeze this process, such as a fork server during its imports."""
    os.kill(os.getpid(), signal.SIGSTOP)


class StopsItsReader:
    """An argument that freezes the process which reads it, before it has read it all."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return stop_itself, ()


def freeze_parent_and_die(_: None, environment: WorkerEnvironment) -> None:
    """Let one of two workers freeze the process from which they were forked, and kill itself."""
    if environment.rank == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def freeze_parent_and_die_on_last_rank(folder: Path, environment: WorkerEnvironment) -> None:
    """Let the first of all workers freeze the process from which it was forked, and then the last one end."""
    if environment.rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        (folder / "frozen").touch()
    if environment.rank == environment.world_size - 1:
        wait_until((folder / "frozen").exists)
        os._exit(1)
    threading.Event().wait()


def write_environment(folder: Path, environment: WorkerEnvironment) -> None:
    """Write this worker's environment variables."""
    (folder / f"{environment.rank}.json").write_text(json.dumps(dict(os.environ)), encoding="utf-8")


def read_environments(folder: Path) -> list[Any]:
    """Return what `write_environment` or `write_place` wrote, in the order of ranks."""
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


def block_on(folder: Path) -> None:
    (folder / f"pid-{os.getpid()}").touch()
    threading.Event().wait()


def block(folder: Path, environment: WorkerEnvironment) -> None:
    (folder / f"pid-{os.getpid()}").touch()
    threading.Event().wait()
