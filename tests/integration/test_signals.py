"""A command ends with 0, 75 or 130 and leaves nothing after signals to it, its group or any of its processes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from services.common.testing.seeds import draw_seed
from services.common.testing.waiting import wait_until
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import REPOSITORY, checkpoints, command_line_of, read_run, start_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

END_SECONDS = 90
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


@dataclass(frozen=True)
class Traces:
    """Processes and temporary folders of a running command."""

    processes: frozenset[psutil.Process]
    folders: frozenset[Path]

    def require_gone(self) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=30)
        assert alive == []
        wait_until(lambda: not self.folders_left(), 30)

    def folders_left(self) -> list[Path]:
        return [path for path in self.folders if path.exists()]


def traces_of(folder: Path, process: subprocess.Popen[str]) -> Traces:
    found = family_of(process)
    # The tests' temporary directory has too long a path for Ray's sockets.
    of_ray = re.findall(r"/tmp/millrace-\d+/ray-\w+", " ".join(each.cmdline()[1] for each in found if is_gcs(each)))
    folders = [*folder.glob("millrace-*/*"), *map(Path, of_ray)]
    assert len(folders) >= 2  # the node's and Ray's
    return Traces(frozenset(found), frozenset(folders))


def is_gcs(process: psutil.Process) -> bool:
    return name_of(process) == "gcs_server"


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
    traces = traces_of(folder, process)
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "its checkpoint is committed" in output
    assert "Traceback" not in output
    assert list(checkpoints(folder / "fsx"))[-1] == f"step-{read_run(folder / 'fsx').records[-1]['step']:08d}"
    traces.require_gone()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raylet", "raylet ended with -9"),
        ("gcs_server", "gcs_server ended with -9"),
        ("ray::RuntimeEnvAgent", "raylet ended with 0"),  # together with its agent, after telling the others
    ],
)
def test_a_lost_ray_ends_the_command_with_75(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], name: str, told: str
) -> None:
    process = start("ray")
    train_a_step(folder, process)
    traces = traces_of(folder, process)
    next(each for each in traces.processes if name in f"{name_of(each)} {command_line_of(each)}").kill()
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert f"Ray was lost: its process {told}" in output
    assert "Traceback" not in output
    traces.require_gone()


@pytest.mark.parametrize(
    ("name", "told"), [("raylet", "its raylet on this node no longer answers"), ("gcs_server", "its head no longer")]
)
def test_a_lost_node_or_head_of_a_joined_cluster_ends_the_command_with_75(
    folder: Path,
    start: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    told: str,
) -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - takes seconds

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        process = start("ray")
        train_a_step(folder, process)
        cluster.head_node.all_processes[name][0].process.kill()  # type: ignore[attr-defined]
        output, _ = process.communicate(timeout=END_SECONDS)
    finally:
        cluster.shutdown()

    assert process.returncode == 75, output
    assert f"Ray was lost: {told}" in output
    assert "Traceback" not in output


def test_nothing_of_ray_outlives_a_killed_command(folder: Path, start: Callable[[str], subprocess.Popen[str]]) -> None:
    process = start("ray")
    train_a_step(folder, process)
    traces = traces_of(folder, process)
    process.kill()

    traces.require_gone()


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
            target = chosen.choice([0, 0, process.pid, chosen.choice([process.pid, *(each.pid for each in family)])])
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


@pytest.mark.parametrize(
    "name",
    [
        "raylet",
        "gcs_server",
        "ray::run_agent",
        "launch.agent_process",
        "ray::RuntimeEnvAgent",
        "launch.guard",
    ],
)
def test_a_signal_ends_a_command_of_whose_ray_a_process_is_frozen(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], name: str
) -> None:
    """The guard kills the frozen process, and the command handles its loss."""
    process = start("ray")
    train_a_step(folder, process)
    traces = traces_of(folder, process)
    next(each for each in traces.processes if name in f"{each.name()} {' '.join(each.cmdline())}").suspend()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "Traceback" not in output
    traces.require_gone()


@pytest.mark.parametrize("launch", ["inline", "ray"])
def test_a_second_signal_ends_a_command_of_which_all_else_is_frozen(
    folder: Path, start: Callable[[str], subprocess.Popen[str]], launch: str
) -> None:
    process = start(launch)
    train_a_step(folder, process)
    family = family_of(process)
    for each in family:
        if "launch.guard" not in " ".join(each.cmdline()):
            each.suspend()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
    output, _ = process.communicate(timeout=END_SECONDS)

    assert process.returncode == 75, output
    assert "Traceback" not in output
    Traces(frozenset(family), frozenset(folder.glob("millrace-*/*"))).require_gone()
