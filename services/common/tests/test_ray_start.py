"""A Ray that a command starts on this machine: private, deaf to the command's signals, and gone with the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.common.testing.commands import start_python
from services.common.testing.waiting import wait_until

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

END_SECONDS = 60
AGENTS_SECONDS = 120
"""Ray's agents try for a minute to tell a head that was killed with the command about the end of their raylet."""

PROGRAM = """
import sys, time
from services.common.launch.launcher import choose_launcher
from services.common.process.entry_point import run_program
from services.common.tests import work

def main(arguments):
    tasks = choose_launcher("ray").map_tasks(work.sleep, [0, int(arguments[0])], 2)
    print("ready", next(tasks), flush=True)
    return sum(result for _, result in tasks)

run_program(main)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command with a Ray and a process group of its own, whose second task takes some seconds."""
    started = []

    def begin(seconds: int = 8) -> subprocess.Popen[str]:
        process = start_python(["-c", PROGRAM, str(seconds)], RAY_ADDRESS="")
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def wait_for_work(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until the first task has ended, and return the processes of the command's Ray."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready (0, 0)\n"
    return psutil.Process(process.pid).children(recursive=True)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run. One that lost its parent may stay a zombie."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def folders_of(family: list[psutil.Process]) -> set[Path]:
    words = " ".join(word for each in family for word in each.cmdline())
    return {Path(found) for found in re.findall(r"/[^\s=]*?/millrace-ray-[^/\s]+", words)}


def test_it_listens_on_loopback_alone_and_nothing_of_it_is_left(start: Start) -> None:
    process = start()
    family = wait_for_work(process)
    listening = {
        each.laddr.ip for found in family for each in found.net_connections("inet") if each.status == psutil.CONN_LISTEN
    }
    folders = folders_of(family)
    for each in family:  # a terminal's signals to the command's group end nothing of Ray
        if os.getpgid(each.pid) == process.pid:
            for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                each.send_signal(signum)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 0, output
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert not living(family)
    assert folders
    assert not [folder for folder in folders if folder.exists()]


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str)
def test_a_signal_to_the_group_ends_the_command_and_ray_ends_after_it(
    start: Start, signum: signal.Signals, exit_code: int
) -> None:
    """While the command waits for Ray. `timeout` and a terminal signal the whole group."""
    process = start()
    family = wait_for_work(process)
    raylet = next(each for each in family if each.name() == "raylet")
    os.killpg(process.pid, signum)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == exit_code, output
    assert "Traceback" not in output
    assert not living([raylet])
    wait_until(lambda: not living(family))


def test_a_second_signal_ends_the_command_at_once(start: Start) -> None:
    process = start()
    wait_for_work(process)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "Traceback" not in output


def test_nothing_of_ray_outlives_a_killed_command_for_long(start: Start) -> None:
    process = start()
    family = wait_for_work(process)
    agents = [each for each in family if each.name().startswith(("ray::Dashboard", "ray::RuntimeEnv"))]
    process.kill()
    process.communicate()

    wait_until(lambda: not set(living(family)) - set(agents))
    wait_until(lambda: not living(agents), AGENTS_SECONDS)


def test_a_command_whose_ray_was_lost_ends_and_leaves_nothing(start: Start) -> None:
    """With 75 where Ray's library raises an error, and with 1 where it ends the process by itself."""
    process = start(seconds=600)
    family = wait_for_work(process)
    next(each for each in family if each.name() == "raylet").kill()
    output, _ = process.communicate(timeout=AGENTS_SECONDS)

    assert process.returncode in (1, 75), output
    assert "Traceback" not in output
    wait_until(lambda: not living(family), AGENTS_SECONDS)
