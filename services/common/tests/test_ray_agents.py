"""Agents on the nodes of a Ray cluster: one a node, whose workers are lost and started again without Ray.

The cluster has four nodes, which are processes of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.errors import WorkersLost
from services.common.launch.launcher import Launcher, WorkerGroupSpec
from services.common.testing.ray_clusters import joining, running_cluster
from services.common.testing.waiting import wait_until
from services.common.tests import work

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

NODES = 4
WORKERS_PER_NODE = 16
AGENT = "launch.agent_process"
TASK = "ray::run_agent"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    node = {"num_cpus": WORKERS_PER_NODE, "resources": {"stage_trainer": 1}}
    with running_cluster([node] * NODES) as started:
        yield started


@pytest.fixture
def launcher(cluster: Any) -> Iterator[Launcher]:
    """The launcher `ray`, joined to the cluster."""
    with joining(cluster) as joined:
        yield joined


def new_spec(folder: Path, workers_per_node: int) -> WorkerGroupSpec:
    preload = ("services.common.tests.work",)
    return WorkerGroupSpec(NODES * workers_per_node, 1, workers_per_node, folder / "shared", preload=preload)


def find_processes(*names: str) -> set[int]:
    """Find the processes of this machine whose title, or command, contains one of the names."""
    found = psutil.process_iter(["cmdline"])
    return {each.pid for each in found if any(name in " ".join(each.info["cmdline"] or []) for name in names)}


def test_64_workers_on_4_nodes_are_4_tasks_of_ray_and_no_actor(tmp_path: Path, launcher: Launcher) -> None:
    with launcher.open_workers(new_spec(tmp_path, WORKERS_PER_NODE)) as workers:
        workers.run(work.write_place, tmp_path)

        assert len(find_processes(TASK)) == NODES
        assert len(find_processes(AGENT)) == NODES
        assert ray._private.state.actors() == {}

    places = sorted(place[:3] for place in work.read_environments(tmp_path))
    expected = [[WORKERS_PER_NODE, node, NODES] for node in range(NODES) for _ in range(WORKERS_PER_NODE)]
    assert places == expected
    assert not find_processes(AGENT)


def test_lost_workers_are_started_again_without_ray(tmp_path: Path, launcher: Launcher) -> None:
    """The processes of Ray's tasks and of the agents are the same before and after: the attempt goes on."""
    names = (TASK, AGENT)
    with launcher.open_workers(new_spec(tmp_path, 2)) as workers:
        workers.run(work.write_place, tmp_path)
        before = find_processes(*names)
        with pytest.raises(WorkersLost, match=r"rank 7 \(pid \d+ on .*\) was killed by SIGKILL"):
            workers.run(work.die_on_last_rank, None)
        workers.run(work.write_rank, tmp_path)

        assert len(before) == 2 * NODES
        assert find_processes(*names) == before
    assert (tmp_path / "7-of-8-on-1").exists()


def test_a_lost_agent_ends_the_attempt_and_the_next_start_has_new_agents(tmp_path: Path, launcher: Launcher) -> None:
    with launcher.open_workers(new_spec(tmp_path, 2)) as workers:
        with pytest.raises(WorkersLost, match="agent"):
            workers.run(work.kill_agent, tmp_path)
        pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        assert len(pids) == 2 * NODES
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))

        workers.run(work.write_rank, tmp_path)

    assert (tmp_path / "7-of-8-on-1").exists()


def test_a_frozen_agent_of_another_node_is_killed_and_the_next_start_has_new_agents(
    tmp_path: Path, launcher: Launcher
) -> None:
    """No command is on that node, so no guard is either."""
    with launcher.open_workers(new_spec(tmp_path, 2)) as workers:
        with pytest.raises(WorkersLost, match="agent"):
            workers.run(work.freeze_agent_and_die, None)
        workers.run(work.write_rank, tmp_path)

    assert (tmp_path / "7-of-8-on-1").exists()


def test_a_killed_task_leaves_the_nodes_to_the_next_start(tmp_path: Path, launcher: Launcher) -> None:
    """Each start of the workers takes all CPUs of all nodes, so the next start waits until Ray has freed them."""
    with launcher.open_workers(new_spec(tmp_path, WORKERS_PER_NODE)) as workers:
        with pytest.raises(WorkersLost, match=r"Ray lost the agent of node 3: its process died$"):
            workers.run(work.kill_task_of_ray, None)
        workers.run(work.write_rank, tmp_path)

    assert (tmp_path / "63-of-64-on-15").exists()


def test_a_node_that_ray_has_lost_ends_the_attempt(tmp_path: Path) -> None:
    """The node's raylet stays a zombie, for which the node's processes take it to be alive: they go on."""
    node = {"num_cpus": 1, "resources": {"stage_trainer": 1}}
    often = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
    with running_cluster([{**node, "_system_config": often}, node]) as started, joining(started) as launcher:
        [lost] = started.worker_nodes
        spec = WorkerGroupSpec(2, 1, 1, tmp_path, preload=("services.common.tests.work",))
        told = r"node \d of the workers was lost: .* \(health check failed"
        with launcher.open_workers(spec) as workers, pytest.raises(WorkersLost, match=told):
            workers.run(work.kill_process, lost.all_processes["raylet"][0].process.pid)
