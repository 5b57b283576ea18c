"""A Ray that a command starts on this machine: private, deaf to the command's signals, and gone with the command.

`tests/integration/test_signals.py` ends a whole stage on such a Ray, or its Ray, by SIGKILL.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.common.testing.commands import start_python
from services.common.testing.waiting import wait_until

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

END_SECONDS = 60

PROGRAM = """
from services.common.launch.launcher import choose_launcher
from services.common.process.entry_point import run_program
from services.common.tests import work

def main(arguments):
    tasks = choose_launcher("ray").map_tasks(work.sleep, [0, 8], 2)
    print("ready", next(tasks), flush=True)
    return sum(result for _, result in tasks)

run_program(main)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A command with a Ray and a process group of its own, whose first task has ended and whose second one has not."""
    started = start_python(["-c", PROGRAM], RAY_ADDRESS="")
    assert started.stdout is not None
    assert started.stdout.readline() == "ready (0, 0)\n"
    yield started
    if started.poll() is None:
        started.kill()
        started.communicate()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run. One that lost its parent may stay a zombie."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_it_listens_on_loopback_alone_and_nothing_of_it_is_left(process: subprocess.Popen[str]) -> None:
    family = psutil.Process(process.pid).children(recursive=True)
    listening = {
        each.laddr.ip for found in family for each in found.net_connections("inet") if each.status == psutil.CONN_LISTEN
    }
    words = " ".join(word for each in family for word in each.cmdline())
    folders = {Path(found) for found in re.findall(r"/[^\s=]*?/millrace-ray-[^/\s]+", words)}
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
    process: subprocess.Popen[str], signum: signal.Signals, exit_code: int
) -> None:
    """While the command waits for Ray. `timeout` and a terminal signal the whole group."""
    family = psutil.Process(process.pid).children(recursive=True)
    raylets = [each for each in family if each.name() == "raylet"]
    os.killpg(process.pid, signum)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == exit_code, output
    assert "Traceback" not in output
    assert not living(raylets)
    wait_until(lambda: not living(family))
