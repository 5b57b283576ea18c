"""Processes of a command that are frozen or killed, and calls that hang: a signal ends the command, or a second one.

Whatever happens, nothing of the command is left: no process, no folder, nothing in shared memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.common.launch import fork_server
from services.common.launch.guard import semaphore_prefix
from services.common.launch.process_family import MARK, STOPPED_SECONDS, find_family, is_stopped
from services.common.process.stop_signals import REPEAT_SECONDS, say_if_heard
from services.common.testing.waiting import wait_until
from services.common.tests.builders import REPOSITORY

pytestmark = pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="a guard reads Linux's /proc")

SEVERAL = pytest.mark.slow
PRELOAD = "services.common.tests.work"
WORKERS, TASKS = ("workers", PRELOAD), ("tasks",)
ROLES = ("command", "guard", "server", "worker")


def freeze_and_kill(process: psutil.Process) -> None:
    process.suspend()
    process.kill()


ACTIONS: dict[str, Callable[[psutil.Process], None]] = {
    "frozen": psutil.Process.suspend,
    "killed": psutil.Process.kill,
    "frozen-and-killed": freeze_and_kill,
}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the stage in small, with a temporary folder of its own, and see to it that it has ended."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "temporary").mkdir()

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.common.tests.stage", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def start_two(start: Start, folder: Path, behaviour: tuple[str, ...]) -> subprocess.Popen[str]:
    """A command that has started two processes, which block."""
    work = folder / "work"
    work.mkdir(parents=True)
    process = start(behaviour[0], str(work), *behaviour[1:])
    wait_until(lambda: len(list(work.glob("pid-*"))) == 2, process=process)
    return process


def find_process(command: psutil.Process, name: str) -> psutil.Process:
    """The command itself, its guard, its fork server, its resource tracker, or the last one of its workers."""
    if name == "command":
        return command
    family = command.children(recursive=True)
    signs = {"guard": "launch.guard", "server": "forkserver", "tracker": "resource_tracker", "task": "spawn_main"}
    if name == "worker":
        server = find_process(command, "server")
        return server.children()[-1]
    return next(each for each in family if signs[name] in " ".join(each.cmdline()))


def require_nothing_left(folder: Path, family: list[psutil.Process], mark: str) -> None:
    def is_alive(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # it ends between the two questions
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    def left() -> list[object]:
        alive = list(filter(is_alive, family))
        shared = Path("/dev/shm").glob(f"*{semaphore_prefix(mark)}*")
        return [*alive, *(folder / "temporary").glob("millrace-*/*"), *shared]

    wait_until(lambda: not left())


@pytest.mark.parametrize(
    ("behaviour", "name", "action"),
    [
        *((WORKERS, name, "killed") for name in ROLES),
        *(
            pytest.param(behaviour, name, action, marks=SEVERAL)
            for behaviour, names, actions in (
                (WORKERS, ROLES, ["frozen-and-killed"]),
                (TASKS, ("command", "guard", "tracker", "task"), list(ACTIONS)),
            )
            for name in names
            for action in actions
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_command_of_which_any_process_is_frozen_or_killed_ends_with_one_signal_and_leaves_nothing(
    tmp_path: Path, start: Start, behaviour: tuple[str, ...], name: str, action: str
) -> None:
    require_end(tmp_path, start, behaviour, [name], action)


def test_commands_of_which_a_process_is_frozen_end_with_one_signal_and_leave_nothing(
    tmp_path: Path, start: Start
) -> None:
    """All at the same time, because a frozen process is killed only after STOPPED_SECONDS."""
    require_end(tmp_path, start, WORKERS, ROLES, "frozen")


def require_end(folder: Path, start: Start, behaviour: tuple[str, ...], names: Sequence[str], action: str) -> None:
    """Start a command for every name, do the action to that process of it, and end it with one signal."""
    processes = [start_two(start, folder / name, behaviour) for name in names]
    found = []
    for name, process in zip(names, processes, strict=True):
        command = psutil.Process(process.pid)
        mark = find_process(command, "server" if behaviour == WORKERS else "task").environ()[MARK]
        found.append((command.children(recursive=True), mark))
        ACTIONS[action](find_process(command, name))
        process.send_signal(signal.SIGTERM)
    for name, process in zip(names, processes, strict=True):
        output, _ = process.communicate(timeout=120)
        is_killed = name == "command" and action != "frozen"
        assert process.returncode == (-signal.SIGKILL if is_killed else 75), f"{name}: {output}"
        assert "Traceback" not in output
    for family, mark in found:
        require_nothing_left(folder, family, mark)


@SEVERAL
def test_nothing_is_left_in_shared_memory_where_who_would_remove_it_was_killed_before(
    tmp_path: Path, start: Start
) -> None:
    process = start_two(start, tmp_path, TASKS)
    command = psutil.Process(process.pid)
    family, mark = command.children(recursive=True), find_process(command, "task").environ()[MARK]
    assert list(Path("/dev/shm").glob(f"*{semaphore_prefix(mark)}*"))
    find_process(command, "tracker").kill()
    process.kill()
    process.communicate()

    require_nothing_left(tmp_path, family, mark)


HALF_ENDED = """
import ctypes, os, platform, subprocess, sys, threading, time
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(os.getpid(), child.pid, flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
"""


def test_a_process_that_is_ending_is_waited_for_whoever_has_started_it_and_its_children_are_not_killed() -> None:
    """A worker whose parent is gone, and which has given its memory back, still holds its lock of a folder."""
    with subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdout=subprocess.PIPE, text=True) as ending:
        assert ending.stdout is not None
        _, child = map(int, ending.stdout.readline().split())
        try:
            wait_until(lambda: psutil.Process(ending.pid).status() == psutil.STATUS_ZOMBIE)
            found = {process.pid for process in find_family(command=-1, sessions=(), mark="of-nobody")}
        finally:
            os.kill(child, signal.SIGKILL)
            ending.kill()

    assert ending.pid in found
    assert child not in found


def is_watching(guard: int) -> bool:
    """The guard ignores stop signals once it has begun."""
    status = Path(f"/proc/{guard}/status").read_text(encoding="ascii")
    (ignored,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def is_in_futex(pid: int) -> bool:
    """Does the main thread wait for a lock, for longer than it takes to get Python's?"""
    for _ in range(10):
        if "futex" not in Path(f"/proc/{pid}/wchan").read_text(encoding="ascii"):
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(("arguments", "exit_code"), [((), 75), (("holding",), -signal.SIGKILL)], ids=["free", "held"])
def test_a_second_signal_ends_a_command_that_hangs_in_c(
    start: Start, arguments: tuple[str, ...], exit_code: int
) -> None:
    """Where Python's lock is free, a thread ends the command with its exit code; else the guard kills it."""
    process = start("hang", *arguments)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    guard = find_process(psutil.Process(process.pid), "guard")
    wait_until(lambda: is_watching(guard.pid) and is_in_futex(process.pid))
    process.send_signal(signal.SIGTERM)
    time.sleep(2 * REPEAT_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == exit_code
    assert output.startswith("millrace: ")
    assert "Traceback" not in output


def test_who_ends_a_command_does_not_wait_for_the_reader_of_a_full_pipe() -> None:
    """A paused pager, or a container's log that is blocked: stderr takes nothing, and nobody closes it."""
    reader, writer = os.pipe()
    stderr = os.dup(2)
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x")
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
        say_if_heard("not heard")
        os.read(reader, 2**16)
        say_if_heard("heard")
    finally:
        os.dup2(stderr, 2)
        for each in (stderr, writer):
            os.close(each)
    with os.fdopen(reader, "rb") as file:
        assert file.read().endswith(b"heard")


def test_a_frozen_task_is_killed_and_the_command_says_so_and_ends_with_75(tmp_path: Path, start: Start) -> None:
    process = start_two(start, tmp_path, TASKS)
    task = find_process(psutil.Process(process.pid), "task")
    task.suspend()
    output, _ = process.communicate(timeout=120)

    assert process.returncode == 75
    assert f"(pid {task.pid}): killed, because it was stopped" in output
    assert "Traceback" not in output


@SEVERAL
def test_what_is_stopped_with_its_command_goes_on_with_it(tmp_path: Path, start: Start) -> None:
    """The guard ends no worker of a stopped command (Ctrl-Z), and all continue after `fg`."""
    process = start_two(start, tmp_path, WORKERS)
    command = psutil.Process(process.pid)
    worker = find_process(command, "worker")
    for each in (command, worker):
        each.suspend()
    time.sleep(2 * STOPPED_SECONDS)
    for each in (worker, command):
        assert is_stopped(each.pid)
        each.resume()
    wait_until(lambda: not is_stopped(process.pid))

    assert worker.is_running()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 75
