"""A command ends with its documented exit code and leaves no process after a signal or a loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from services.common.testing.waiting import wait_until
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import checkpoints, command_line_of, read_run, start_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

END_SECONDS = 90
LOST_SECONDS = 120
"""Seconds after which nothing is left of a lost Ray: its library looks for its head for 60 s."""
ENDLESS = ("--batch.global_batch_size=128", "--train.max_steps=100000", "--checkpoint.interval_steps=3")


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


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("launch", ["inline", "ray"])
def test_a_signal_to_all_commits_a_checkpoint_and_leaves_nothing(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], launch: str
) -> None:
    """systemd and Slurm send it to every process; `timeout` to the command and to its group, in which Ray is not."""
    process = start(launch)
    train_a_step(folder, process)
    family = family_of(process)
    for each in family if launch == "inline" else []:
        each.terminate()
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert list(checkpoints(folder / "fsx"))[-1] == f"step-{read_run(folder / 'fsx').records[-1]['step']:08d}"
    require_gone(family)
    wait_until(lambda: not list(folder.glob("millrace-*")), 30)


@pytest.mark.parametrize(
    ("name", "exit_codes"), [("raylet", (1, 75)), ("gcs_server", (1, 75)), ("the command", (-signal.SIGKILL,))]
)
def test_a_killed_ray_or_command_leaves_nothing(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], name: str, exit_codes: tuple[int, ...]
) -> None:
    """Ray's library may end the command itself, with 1."""
    process = start("ray")
    train_a_step(folder, process)
    family = family_of(process)
    named = [each for each in family if command_line_of(each).split(" ")[0].endswith(f"/{name}")]
    (named[0] if named else process).kill()
    output, _ = process.communicate(timeout=LOST_SECONDS)

    assert process.returncode in exit_codes, output
    assert "Traceback" not in output
    require_gone(family, LOST_SECONDS)


@pytest.mark.parametrize("launch", ["inline", "ray"])
def test_a_second_signal_ends_a_command_whose_workers_are_frozen(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], launch: str
) -> None:
    process = start(launch)
    train_a_step(folder, process)
    family = family_of(process)
    beats = [json.loads(path.read_text()) for path in folder.glob("fsx/run/*/heartbeats/rank-*.json")]
    workers = [psutil.Process(beat["pid"]) for beat in beats]
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
