"""A trainer on the nodes of a Ray cluster: all workers stop after the same step, and no loss ends the run."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

from services.common.testing.waiting import wait_until
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import checkpoints, command_line_of, read_run, start_trainer

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
def command(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Start a trainer on the cluster, and wait for its first step."""
    recipe, root = write_recipe(tmp_path), tmp_path / "fsx"
    make_corpus(root, make_recipe(tmp_path))
    slow = ("--batch.global_batch_size=256", "--train.max_steps=2000", "--optimizer.decay_steps=2000")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    # Ray Train's record of runs waits for a dashboard, which this cluster has not, for a minute at the run's end.
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
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
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes]
    family = [each for pid in raylets for each in psutil.Process(pid).children(recursive=True)]
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
    require_stop(command, root, "sigterm")


def require_stop(command: subprocess.Popen[str], root: Path, reason: str) -> None:
    output, _ = command.communicate(timeout=DEADLINE_SECONDS)
    assert command.returncode == 75, output
    assert f"Stopped by {reason} after step" in output
    (attempts,) = root.glob("run/*/attempts.jsonl")
    attempt = json.loads(attempts.read_text(encoding="utf-8"))
    assert list(checkpoints(root))[-1] == f"step-{attempt['last_step']:08d}"
