"""Work on a Ray cluster: it stays on the nodes of its stage, and what it cannot have ends it with 75.

A pod of a stage is a Ray node with the resource `stage_<name>`; here the nodes are processes of this machine. Ray takes
this one to be on the head, which so stands for the pod that runs the stage's command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import NoRoomForWorkers
from services.common.launch.launcher import Launcher, WorkerGroupSpec, choose_launcher
from services.common.tests import work

ray = pytest.importorskip("ray")
pytest.importorskip("torch")  # Ray Train's

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of the trainer, and a larger one of another stage."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    group: dict[str, Any] = {"num_cpus": 4, "resources": {"stage_trainer": 1}}
    started = Cluster(initialize_head=True, head_node_args=group)
    started.add_node(**group)
    started.add_node(num_cpus=16, resources={"stage_tokenizer": 1})
    started.wait_for_nodes()
    yield started
    started.shutdown()


@pytest.fixture
def launcher(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Ray's, joined to the cluster."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield choose_launcher("ray")
    ray.shutdown()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.launch.ray_launcher.GROUP_START_SECONDS", 1.0)
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")


def trainer_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if "stage_trainer" in node["Resources"]}


@pytest.mark.parametrize(("num_workers", "workers_per_node"), [(2, 1), (4, 2)])
def test_every_node_of_the_stage_gets_its_workers(
    tmp_path: Path, launcher: Launcher, num_workers: int, workers_per_node: int
) -> None:
    nodes, shared = tmp_path / "nodes", tmp_path / "shared"
    nodes.mkdir()
    (shared / "ray-train/attempt").mkdir(parents=True)  # of a command that was killed

    launcher.run_workers(work.write_node, nodes, WorkerGroupSpec(num_workers, 1, workers_per_node, shared))

    placed = [path.read_text(encoding="utf-8") for path in nodes.iterdir()]
    assert sorted(placed) == sorted([*trainer_nodes()] * workers_per_node)
    assert list(shared.iterdir()) == []


def test_tasks_run_on_the_nodes_of_the_stage_alone(launcher: Launcher) -> None:
    ran_on = {node for _, node in launcher.map_tasks(work.name_node, range(8), 8)}

    assert ran_on <= trainer_nodes()


@pytest.mark.parametrize(
    ("num_workers", "threads"), [(3, 1), (2, 5)], ids=["more workers than nodes", "more threads than CPUs"]
)
def test_workers_that_the_nodes_cannot_hold_end_the_command(
    tmp_path: Path, launcher: Launcher, impatient: None, num_workers: int, threads: int
) -> None:
    wanted = rf"no room for {num_workers} x \(CPU {threads}, stage_trainer 0.99\)(.|\n)*CPU 4, stage_trainer 1\n"

    with pytest.raises(NoRoomForWorkers, match=wanted):
        launcher.run_workers(work.write_node, tmp_path, WorkerGroupSpec(num_workers, threads, 1, tmp_path))


def test_nodes_that_others_have_taken_end_the_command_too(tmp_path: Path, launcher: Launcher, impatient: None) -> None:
    dict(launcher.map_tasks(work.square, range(1), 1))  # joins the cluster
    holders = [ray.remote(num_cpus=0, resources={"stage_trainer": 0.5})(_Holder).remote() for _ in range(2)]
    ray.get([holder.hold.remote() for holder in holders])

    with pytest.raises(NoRoomForWorkers, match="no room for 2 x"):
        launcher.run_workers(work.write_node, tmp_path, WorkerGroupSpec(2, 1, 1, tmp_path))


class _Holder:
    def hold(self) -> None:
        """Returns once the node has made room for this."""
