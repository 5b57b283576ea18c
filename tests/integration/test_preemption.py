"""A trainer on the nodes of a Ray cluster: all workers stop after the same step, and no loss ends the run."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

from services.common.testing.waiting import wait_until
from services.trainer.checkpoints.memory import MEMORY
from services.trainer.metrics.events import read_events
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import checkpoints, command_line_of, read_run, run_trainer, start_trainer, state_hash

DEADLINE_SECONDS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Start a head without CPUs, and two nodes with one worker each."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()


@pytest.fixture
def ray_address(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    # Ray Train's record of runs waits for a dashboard, which this cluster has not, for a minute at the run's end.
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")


@pytest.fixture
def command(tmp_path: Path, ray_address: None) -> Iterator[subprocess.Popen[str]]:
    """Start a trainer on the cluster, and wait for its first step."""
    recipe, root = write_recipe(tmp_path), tmp_path / "fsx"
    make_corpus(root, make_recipe(tmp_path))
    slow = ("--batch.global_batch_size=256", "--train.max_steps=2000", "--optimizer.decay_steps=2000")
    with start_trainer(recipe, root, *slow, launch="ray") as process:
        try:
            wait_until(lambda: read_run(root).records, 240, process=process)
            yield process
        finally:
            process.kill()


def test_a_preemption_notice_ends_the_run_with_one_checkpoint_and_75(
    tmp_path: Path, cluster: Cluster, command: subprocess.Popen[str]
) -> None:
    node = next(iter(cluster.worker_nodes))
    deadline_ms = int((time.time() + DEADLINE_SECONDS) * 1000)
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    is_accepted, why_not = GcsClient(cluster.address).drain_node(node.node_id, reason, "spot notice", deadline_ms)
    assert is_accepted, why_not

    require_stop(command, tmp_path / "fsx", "preemption")


RAY_WORKER, NODE_PROCESS = "ray::RayTrainWorker", "launch.node_process"


def find_processes(cluster: Cluster, name: str) -> list[psutil.Process]:
    """Find the processes of the cluster whose title or command contains the name, oldest first."""
    family = [each for node in cluster.worker_nodes for each in raylet_of(node).children(recursive=True)]
    found = [each for each in family if name in command_line_of(each)]
    return sorted(found, key=lambda each: each.create_time())


def test_a_killed_worker_is_replaced_without_ray_and_a_killed_agent_by_new_workers_of_ray(
    tmp_path: Path, cluster: Cluster, command: subprocess.Popen[str]
) -> None:
    root = tmp_path / "fsx"
    ray_workers, agents = (find_processes(cluster, name) for name in (RAY_WORKER, NODE_PROCESS))
    assert (len(ray_workers), len(agents)) == (2, 2)

    def wait_for_restarts(count: int) -> None:
        def count_restarts() -> int:
            return sum(path.read_text().count('"restarted"') for path in root.glob("run/*/events.jsonl"))

        wait_until(lambda: count_restarts() == count, 240, process=command)

    workers = [each for agent in agents for each in agent.children(recursive=True) if not each.children()]
    max(workers, key=lambda each: each.memory_info().rss).kill()
    wait_for_restarts(1)
    assert find_processes(cluster, RAY_WORKER) == ray_workers
    assert find_processes(cluster, NODE_PROCESS) == agents

    agents[0].kill()
    wait_for_restarts(2)
    for name, before in ((RAY_WORKER, ray_workers), (NODE_PROCESS, agents)):
        assert not set(find_processes(cluster, name)) & set(before)
    records = read_run(root).records
    wait_until(lambda: read_run(root).records != records, 240, process=command)  # before, a stop is at once
    command.terminate()  # as `ray job stop` does
    require_stop(command, root, "SIGTERM")


def test_a_lost_node_costs_the_steps_since_the_newest_copy_in_memory(
    tmp_path: Path, cluster: Cluster, ray_address: None
) -> None:
    """The node of rank 0 is lost with its memory, and another one takes its place."""
    recipe, root, straight = write_recipe(tmp_path), tmp_path / "fsx", tmp_path / "straight"
    for each in (root, straight):
        make_corpus(each, make_recipe(tmp_path))
    options = ("--batch.global_batch_size=128", "--train.max_steps=60", "--checkpoint.interval_steps=1000")
    with start_trainer(recipe, root, *options, "--checkpoint.memory_interval_steps=2", launch="ray") as process:
        wait_until(lambda: len(read_run(root).records) > 10, 240, process=process)
        (run,) = root.glob("run/*/")
        pid = json.loads((run / "heartbeats" / "rank-00000.json").read_bytes())["pid"]
        parents = psutil.Process(pid).parents()
        (victim,) = (node for node in cluster.worker_nodes if raylet_of(node) in parents)
        for lost in [raylet_of(victim), *raylet_of(victim).children(recursive=True)]:
            lost.kill()
        cluster.remove_node(victim, allow_graceful=False)
        last_step = len(read_run(root).records)
        (memory,) = MEMORY.glob(f"millrace-{run.name}-*/node-0")
        shutil.rmtree(memory)
        cluster.add_node(num_cpus=1)
        output, _ = process.communicate(timeout=240)

    assert process.returncode == 0, output
    (event,) = (each for each in read_events(run) if each["event"] == "recovered")
    assert last_step - event["step"] <= 2
    exit_code, output = run_trainer(recipe, straight, *options)
    assert exit_code == 0, output
    assert read_run(root).losses == read_run(straight).losses
    assert len({state_hash(checkpoints(each)["step-00000060"]) for each in (root, straight)}) == 1
    assert not memory.parent.exists()


def raylet_of(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def require_stop(command: subprocess.Popen[str], root: Path, reason: str) -> None:
    output, _ = command.communicate(timeout=DEADLINE_SECONDS)
    assert command.returncode == 75, output
    assert f"Stopped by {reason} after step" in output
    (attempts,) = root.glob("run/*/attempts.jsonl")
    attempt = json.loads(attempts.read_text(encoding="utf-8"))
    assert list(checkpoints(root))[-1] == f"step-{attempt['last_step']:08d}"
