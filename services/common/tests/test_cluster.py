"""Work on a Ray cluster: it stays on the nodes of its stage, and what it cannot have ends it with 75.

A pod of a stage is a Ray node with the resource `stage_<name>`; here the nodes are processes of this machine, at two of
its addresses. Ray takes this one to be on the head, which so stands for the pod that runs the stage's command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.errors import NoRoomForWorkers
from services.common.launch.launcher import Launcher, WorkerGroupSpec, run_workers
from services.common.testing.ray_clusters import joining, running_cluster
from services.common.tests import work

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

LOOPBACK_ADDRESS = "127.0.0.1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of the trainer, in Ray's view with NeuronCores and GPUs, and a larger one of another stage."""
    group: dict[str, Any] = {
        "num_cpus": 4,
        "num_gpus": 2,
        "resources": {"stage_trainer": 1, "neuron_cores": 3},
    }
    of_tokenizer = {"num_cpus": 16, "resources": {"stage_tokenizer": 1}}
    with running_cluster([group, {"node_ip_address": LOOPBACK_ADDRESS, **group}, of_tokenizer]) as started:
        yield started


@pytest.fixture
def launcher(cluster: Any) -> Iterator[Launcher]:
    """The launcher `ray`, joined to the cluster."""
    with joining(cluster) as joined:
        yield joined


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.launch.ray_placement.GROUP_START_SECONDS", 1.0)


def trainer_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if "stage_trainer" in node["Resources"]}


@pytest.mark.parametrize(
    ("num_workers", "workers_per_node", "on_nodes"), [(2, 1, [1, 1]), (4, 2, [2, 2]), (3, 2, [1, 2])]
)
def test_every_node_of_the_stage_gets_its_workers(
    tmp_path: Path,
    cluster: Any,
    launcher: Launcher,
    num_workers: int,
    workers_per_node: int,
    on_nodes: list[int],
) -> None:
    nodes, shared = tmp_path / "nodes", tmp_path / "shared"
    nodes.mkdir()
    shared.mkdir()

    run_workers(launcher, work.write_node, nodes, WorkerGroupSpec(num_workers, 1, workers_per_node, shared))

    placed = Counter(path.read_text(encoding="utf-8") for path in nodes.iterdir())
    of_trainer = [node for node in cluster.list_all_nodes() if node.node_id in trainer_nodes()]
    assert placed.keys() <= {str(node.all_processes["raylet"][0].process.pid) for node in of_trainer}
    assert sorted(placed.values()) == on_nodes


def test_tasks_run_on_the_nodes_of_the_stage_alone_and_some_although_all_cpus_are_taken(launcher: Launcher) -> None:
    ran_on = {node for _, node in launcher.map_tasks(work.name_node, range(8), 8)}
    holders = [ray.remote(num_cpus=4, resources={"stage_trainer": 0.999})(_Holder).remote() for _ in range(2)]
    ray.get([holder.hold.remote() for holder in holders])

    answers = list(launcher.map_nodes(work.name_node, 0))
    beside_workers = dict(launcher.map_on_nodes(work.name_node, range(8), 2))

    assert ran_on <= trainer_nodes()
    assert sorted(str(node) for _, node in answers) == sorted(trainer_nodes())
    assert len({name for name, _ in answers}) == len(answers)
    assert sorted(beside_workers) == list(range(8))
    assert set(beside_workers.values()) == trainer_nodes()


@pytest.mark.parametrize(
    ("num_workers", "threads", "per_node", "device", "wanted"),
    [
        (3, 1, 1, "cpu", r"3 x \(CPU 1, stage_trainer 0.99\)(.|\n)*CPU 4, stage_trainer 1\n"),
        (2, 5, 1, "cpu", r"2 x \(CPU 5, "),
        (7, 1, 4, "xla", r"2 x \(CPU 4, neuron_cores 4, (.|\n)*neuron_cores 3, stage_trainer 1\n"),
        (6, 1, 3, "cuda", r"2 x \(CPU 3, GPU 3, (.|\n)*GPU 2, stage_trainer 1\n"),
    ],
    ids=["nodes", "CPUs", "NeuronCores", "GPUs"],
)
def test_workers_that_the_nodes_cannot_hold_end_the_command(
    tmp_path: Path,
    launcher: Launcher,
    impatient: None,
    num_workers: int,
    threads: int,
    per_node: int,
    device: str,
    wanted: str,
) -> None:
    spec = WorkerGroupSpec(num_workers, threads, per_node, tmp_path, device=device)
    with pytest.raises(NoRoomForWorkers, match=wanted):
        run_workers(launcher, work.write_node, tmp_path, spec)


def test_workers_on_neuron_cores_know_theirs_and_meet_on_the_first_node(
    tmp_path: Path, cluster: Any, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cluster.address.startswith(LOOPBACK_ADDRESS):
        pytest.skip("this machine has no second address, and Ray tells its nodes' workers apart by theirs")
    spec = WorkerGroupSpec(4, 1, 2, tmp_path / "shared", device="xla", logical_core_size=2)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")  # of the command: no worker's

    run_workers(launcher, work.write_environment, tmp_path, spec)

    found = work.read_environments(tmp_path)
    of_ranks = {
        "RANK": ["0", "1", "2", "3"],
        "NEURON_PJRT_PROCESS_INDEX": ["0", "1", "2", "3"],
        "LOCAL_RANK": ["0", "1", "0", "1"],
        "NEURON_RT_VISIBLE_CORES": ["0", "1", "0", "1"],
        "PJRT_LOCAL_PROCESS_RANK": ["0", "1", "0", "1"],
        "GROUP_RANK": ["0", "0", "1", "1"],
    }
    of_all = {
        "WORLD_SIZE": "4",
        "NEURON_PJRT_WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "PJRT_LOCAL_PROCESS_COUNT": "2",
        "NEURON_LOGICAL_NC_CONFIG": "2",
    }
    assert {name: [each[name] for each in found] for name in of_ranks} == of_ranks
    assert {name: {each[name] for each in found} for name in of_all} == {
        name: {value} for name, value in of_all.items()
    }
    [address], [port], [communicator] = (
        {each[name] for each in found} for name in ("MASTER_ADDR", "MASTER_PORT", "NEURON_RT_ROOT_COMM_ID")
    )
    assert communicator.startswith(f"{address}:")
    assert communicator != f"{address}:{port}"
    assert not {name for each in found for name in each} & {"TORCHELASTIC_RUN_ID", "NEURON_PARALLEL_COMPILE"}
    addresses = {cluster.address.rpartition(":")[0], LOOPBACK_ADDRESS}
    interfaces = [found[rank]["CCOM_SOCKET_IFNAME"] for rank in (0, 2)]
    on_interfaces = [{each.address for each in psutil.net_if_addrs()[name]} & addresses for name in interfaces]
    assert sorted(on_interfaces, key=sorted) == sorted([{each} for each in addresses], key=sorted)
    assert on_interfaces[0] == {address}


def test_workers_on_gpus_each_take_that_of_their_place_on_the_node(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")  # the command's own, which no node's workers go by

    run_workers(launcher, work.write_rank, tmp_path, WorkerGroupSpec(4, 1, 2, tmp_path / "shared", device="cuda"))
    taken = sorted(path.name for path in tmp_path.glob("*-of-4-on-*"))
    run_workers(
        launcher, work.write_environment, tmp_path, WorkerGroupSpec(2, 1, 1, tmp_path / "shared", device="cuda")
    )

    assert taken == ["0-of-4-on-0", "1-of-4-on-1", "2-of-4-on-0", "3-of-4-on-1"]
    assert not any("CUDA_VISIBLE_DEVICES" in each for each in work.read_environments(tmp_path))


class _Holder:
    def hold(self) -> None:
        """Returns once the node has made room for this."""
