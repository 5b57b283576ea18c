"""Workers on NeuronCores: each is told its core and where the others are, before torch_xla is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import DeviceError
from services.common.launch import inline
from services.common.launch.launcher import (
    LAUNCHERS,
    LOOPBACK_INTERFACE,
    WorkerEnvironment,
    WorkerGroupSpec,
    choose_launcher,
    run_workers,
)
from services.common.launch.neuron_environment import (
    CONTRADICTING_VARIABLES,
    NodeNetwork,
    find_network,
    join_address,
    neuron_environment,
    set_neuron_environment,
)
from services.common.testing.commands import REPOSITORY
from services.common.tests import work

SPEC = WorkerGroupSpec(64, 1, workers_per_node=32, shared_folder=Path(), device="xla")
LAST_OF_64 = WorkerEnvironment(63, 64, local_rank=31, local_world_size=32, node_rank=1)
ROOT = "10.0.0.1:40001"
WITH_EFA = NodeNetwork("eth0", has_efa=True)
OF_ONE_CORE = (
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_PJRT_PROCESS_INDEX",
    "NEURON_PJRT_WORLD_SIZE",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
)


def test_the_last_worker_of_two_trn1_nodes_has_core_31_and_meets_the_others_on_the_first() -> None:
    assert neuron_environment(SPEC, LAST_OF_64, ROOT, WITH_EFA) == {
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:40001",
        "CCOM_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NEURON_RT_VISIBLE_CORES": "31",
        "NEURON_PJRT_PROCESS_INDEX": "63",
        "NEURON_PJRT_WORLD_SIZE": "64",
        "PJRT_LOCAL_PROCESS_RANK": "31",
        "PJRT_LOCAL_PROCESS_COUNT": "32",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
    }
    without_efa = neuron_environment(SPEC, LAST_OF_64, ROOT, NodeNetwork("eth0", has_efa=False))
    assert not [name for name in without_efa if name.startswith("FI_")]


def test_torch_neuron_chooses_its_core_itself_and_is_told_how_large_one_is() -> None:
    variables = neuron_environment(replace(SPEC, device="neuron", logical_core_size=2), LAST_OF_64, ROOT, WITH_EFA)

    assert variables["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert variables["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:40001"
    assert variables.keys().isdisjoint(OF_ONE_CORE)


def test_an_address_that_no_interface_has_is_named_with_those_that_are_there() -> None:
    with pytest.raises(DeviceError, match=rf"203\.0\.113\.1(.|\n)*{LOOPBACK_INTERFACE}: .*127\.0\.0\.1"):
        find_network("203.0.113.1")


@pytest.mark.parametrize(("device_files", "has_efa"), [([], False), (["rdma_cm"], False), (["uverbs0"], True)])
def test_efa_is_there_where_the_pod_has_one_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_files: list[str], has_efa: bool
) -> None:
    monkeypatch.setattr("services.common.launch.neuron_environment.EFA_DEVICES", tmp_path)
    for name in device_files:
        (tmp_path / name).touch()

    assert find_network("127.0.0.1") == NodeNetwork(LOOPBACK_INTERFACE, has_efa)
    assert join_address("fd00::1", 40_001) == "[fd00::1]:40001"


def test_what_contradicts_the_variables_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict.fromkeys(CONTRADICTING_VARIABLES, "1") | {"NEURON_RT_VISIBLE_CORES": "0-31", "HOME": "/root"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)  # of other tests in this process
    variables = neuron_environment(SPEC, LAST_OF_64, ROOT, WITH_EFA)

    set_neuron_environment(variables)

    assert environment == {**variables, "HOME": "/root"}


@pytest.mark.parametrize("torchrun", [{}, {"TORCHELASTIC_RUN_ID": "1"}], ids=["plain", "below torchrun"])
def test_torch_xla_leaves_them_as_they_are(torchrun: dict[str, str]) -> None:
    """torch_xla with Neuron's packages derives its variables from torchrun's when it is imported."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed; `make test-torch29` has it")
    variables = neuron_environment(SPEC, LAST_OF_64, ROOT, WITH_EFA)
    program = f"""if True:
        import json, os
        from services.common.launch.neuron_environment import set_neuron_environment
        set_neuron_environment({variables})
        from torch_xla._internal import neuron
        neuron.configure_pjrt_environment()
        print(json.dumps(dict(os.environ)))
    """

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, **torchrun},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert variables.items() <= json.loads(done.stdout).items()


@pytest.fixture
def spec(tmp_path: Path) -> WorkerGroupSpec:
    return WorkerGroupSpec(2, 1, workers_per_node=2, shared_folder=tmp_path, device="xla")


def test_inline_workers_share_one_node(tmp_path: Path, spec: WorkerGroupSpec) -> None:
    run_workers(inline, work.write_environment, tmp_path, spec)

    first, second = work.read_environments(tmp_path)
    assert [each["NEURON_RT_VISIBLE_CORES"] for each in (first, second)] == ["0", "1"]
    assert [each["NEURON_PJRT_PROCESS_INDEX"] for each in (first, second)] == ["0", "1"]
    assert (second["LOCAL_WORLD_SIZE"], second["GROUP_RANK"]) == ("2", "0")
    assert first["NEURON_RT_ROOT_COMM_ID"] == second["NEURON_RT_ROOT_COMM_ID"]
    assert first["CCOM_SOCKET_IFNAME"] == LOOPBACK_INTERFACE


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_choice_of_cores_that_workers_would_not_follow_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, spec: WorkerGroupSpec
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")

    with pytest.raises(DeviceError, match=r"NEURON_RT_VISIBLE_CORES=4-7 (.|\n)*unset NEURON_RT_VISIBLE_CORES"):
        run_workers(choose_launcher(name), work.fail_with_a_bug, None, spec)
