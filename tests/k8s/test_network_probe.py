"""Network policies that nothing enforces are found before anybody relies on them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from k8s.client import network_probe
from k8s.client.network_probe import CLOSED, OPEN, SCRIPT, require_network_policies
from services.common.errors import DeviceError
from tests.k8s.rendered import Thing, cluster_of, of_kind

HEAD = {"metadata": {"name": "head"}, "spec": {"containers": [{"name": "ray-head"}]}}


class Pods:
    """The output of the Job's pod and of the head's pod."""

    def __init__(self, job: str, head: str) -> None:
        self.job, self.head = job, head

    def execute(self, pod: str, container: str, command: list[str]) -> str:
        assert (pod, container, command[2]) == ("head", "ray-head", SCRIPT)
        return f"{self.head}\n"


def found(things: list[Thing], job: str, head: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(network_probe, "run_setup_job", lambda api, made: api.job)
    api: Any = Pods(job, head)
    return require_network_policies(api, of_kind(things, "Namespace")["millrace"], cluster_of(things), HEAD)


@pytest.mark.parametrize(("job", "head"), [(OPEN, CLOSED), (CLOSED, OPEN), (OPEN, OPEN)])
def test_a_pod_that_gets_through_is_an_error_unless_the_overlay_says_so(
    overlays: dict[str, list[Thing]], job: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError) as refused:
        found(overlays["eks"], job, head, monkeypatch)
    assert ("a Job" in str(refused.value), "the RayCluster" in str(refused.value)) == (job == OPEN, head == OPEN)
    assert "not-enforced" not in found(overlays["eks"], CLOSED, CLOSED, monkeypatch)
    assert found(overlays["local"], job, head, monkeypatch)


def test_a_probe_that_says_something_else_proves_nothing(
    overlays: dict[str, list[Thing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for things in overlays.values():
        with pytest.raises(DeviceError):
            found(things, "", "sh: no python", monkeypatch)


def test_the_program_tells_an_address_that_answers_from_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert answer(port, "0.5") == OPEN
    assert answer(port, "60") == CLOSED


def answer(port: str, seconds: str) -> str:
    environment = os.environ | {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    command = [sys.executable, "-c", SCRIPT, seconds]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
