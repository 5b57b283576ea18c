"""A command ends with 0, 75 or 130 and leaves nothing after signals to it, its group or any of its processes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.testing.seeds import draw_seed
from services.common.testing.waiting import wait_until
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import REPOSITORY, checkpoints, command_line_of, read_run, start_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

END_SECONDS = 90
LOST_SECONDS = 120
"""Seconds after which nothing is left of a lost Ray: its library looks for its head for 60 s."""
LOST_EXIT_CODES = (1, 75)
"""The exit codes of a command that loses a process of Ray: 1 where Ray's library ends the command itself."""
ENDLESS = ("--batch.global_batch_size=128", "--train.max_steps=100000", "--checkpoint.interval_steps=3")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a recipe and a root with its corpus; the commands' temporary files lie beside them."""
    made = tmp_path_factory.mktemp("signals")
    make_corpus(made / "fsx", make_recipe(made))
    write_recipe(made)
    return made


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start the trainer; the test's end kills it if it still runs."""
    started = []

    def begin(launch: str) -> subprocess.Popen[str]:
        started.append(start_trainer(folder / "small.toml", folder / "fsx", *ENDLESS, launch=launch))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def train_a_step(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the command has recorded one more step."""
    before = len(read_run(folder / "fsx").records)
    wait_until(lambda: len(read_run(folder / "fsx").records) > before, 300, process=process)


def require_gone(family: Iterable[psutil.Process], seconds: float = 30) -> None:
    _, alive = psutil.wait_procs(family, timeout=seconds)
    assert alive == []


def folders_of(folder: Path, family: Iterable[psutil.Process]) -> set[Path]:
    """Find the temporary folders of a command: its node's, and those that need a short path for sockets."""
    short = re.findall(r"/tmp/millrace-[\w-]+", " ".join(map(command_line_of, family)))
    return {*folder.glob("millrace-*"), *map(Path, short)}


def workers_among(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Find the processes that have a worker's log open."""
    return [each for each in family if any("/rank-0" in file.path for file in files_of(each))]


def files_of(process: psutil.Process) -> list[Any]:
    with suppress(psutil.Error):
        return process.open_files()
    return []


def name_of(process: psutil.Process) -> str:
    """Return the name of a process; empty where it has ended, as an idle worker of Ray may at any moment."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def test_a_signal_to_the_group_does_not_reach_ray_and_commits_a_checkpoint(
    folder: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    """`timeout` sends its signal to the command and to the command's group."""
    process = start("ray")
    train_a_step(folder, process)
    family = family_of(process)
    folders = folders_of(folder, family)
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "its checkpoint is committed" in output
    assert "Traceback" not in output
    assert list(checkpoints(folder / "fsx"))[-1] == f"step-{read_run(folder / 'fsx').records[-1]['step']:08d}"
    require_gone(family)
    assert len(folders) >= 2
    wait_until(lambda: not any(path.exists() for path in folders), 30)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_lost_ray_ends_the_command_and_leaves_nothing(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], name: str
) -> None:
    process = start("ray")
    train_a_step(folder, process)
    family = family_of(process)
    next(each for each in family if name_of(each) == name).kill()
    output, _ = process.communicate(timeout=LOST_SECONDS)

    assert process.returncode in LOST_EXIT_CODES, output
    assert "Traceback" not in output
    require_gone(family, LOST_SECONDS)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_lost_node_or_head_of_a_joined_cluster_ends_the_command(
    folder: Path,
    start: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - takes seconds

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        process = start("ray")
        train_a_step(folder, process)
        cluster.head_node.all_processes[name][0].process.kill()  # type: ignore[attr-defined]
        output, _ = process.communicate(timeout=LOST_SECONDS)
    finally:
        cluster.shutdown()

    assert process.returncode in LOST_EXIT_CODES, output
    assert "Traceback" not in output


def test_sigterm_to_every_process_commits_a_checkpoint(
    folder: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    """As systemd and Slurm send it, to all processes of a service or a step."""
    process = start("inline")
    train_a_step(folder, process)
    for each in [*family_of(process), psutil.Process(process.pid)]:
        each.terminate()
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert list(checkpoints(folder / "fsx"))[-1] == f"step-{read_run(folder / 'fsx').records[-1]['step']:08d}"


def test_nothing_of_ray_outlives_a_killed_command(folder: Path, start: Callable[[str], subprocess.Popen[str]]) -> None:
    process = start("ray")
    train_a_step(folder, process)
    family = family_of(process)
    process.kill()

    require_gone(family, LOST_SECONDS)


def test_random_signals_to_random_processes_end_the_command_in_order(
    folder: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    seed = draw_seed()
    chosen = random.Random(seed)
    for number in range(12):
        process = start("inline")
        began_at = time.monotonic()
        time.sleep(chosen.uniform(1, 20))
        story = [f"seed {seed}, command {number}"]
        family: set[psutil.Process] = set()
        for _ in range(chosen.choice([1, 1, 2, 3])):
            family |= set(family_of(process))
            signum = chosen.choice(SIGNALS)
            # Python's own resource tracker, once killed, prints tracebacks of its successor.
            victims = [each.pid for each in family if "resource_tracker" not in command_line_of(each)]
            target = chosen.choice([0, 0, process.pid, chosen.choice([process.pid, *victims])])
            story.append(f"{time.monotonic() - began_at:.1f} s: {signum.name} to {target or 'the group'}")
            send(process, target, signum)
            time.sleep(chosen.choice([0.0, 0.1, 1.0, 3.0]))
        family |= set(family_of(process))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=END_SECONDS)

        account = "\n".join([*story, output])
        is_killed = process.returncode == -signal.SIGKILL and "SIGKILL" in account
        assert is_killed or process.returncode in (0, 75, 130), account
        assert "Traceback" not in output, account
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == [], account
    verify = [sys.executable, "-m", "services.common.artifacts", "verify", str(folder / "fsx")]
    assert subprocess.run(verify, cwd=REPOSITORY, check=False).returncode == 0


def send(process: subprocess.Popen[str], target: int, signum: signal.Signals) -> None:
    """Send a signal to a process, or to the command's group if `target` is 0; SIGCONT follows SIGSTOP after 1 s."""

    def deliver(number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if target:
                os.kill(target, number)
            else:
                os.killpg(process.pid, number)

    deliver(signum)
    if signum == signal.SIGSTOP:
        time.sleep(1)
        deliver(signal.SIGCONT)


@pytest.mark.parametrize("launch", ["inline", "ray"])
def test_a_second_signal_ends_a_command_whose_workers_are_frozen(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], launch: str
) -> None:
    process = start(launch)
    train_a_step(folder, process)
    family = family_of(process)
    workers = workers_among(family)
    assert len(workers) == 2
    for each in workers:
        each.suspend()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "Traceback" not in output
    require_gone(family)
