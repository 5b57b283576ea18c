"""A simulated AWS for the tests of the commands: moto's server on the loopback, in this process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer
from moto.servicequotas.responses import ServiceQuotasResponse

from infra.tests.programs import Programs
from infra.tests.service_models import share_service_models
from infra.tests.site import Site, make_cluster

REGION = "us-west-2"


@pytest.fixture(scope="session", autouse=True)
def service_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_service_models(patch)
        yield


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"), monkeypatch)


class Aws:
    """Clients of the simulated account, and what moto cannot do: quotas and capacity reservations."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.quotas: dict[str, float] = {}
        self.reservations: list[str] = []
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """Made once: reading EC2's model takes half a second."""
        if service not in self._clients:
            self._clients[service] = boto3.client(service, region_name=REGION)
        return self._clients[service]

    def reset(self) -> None:
        requests.post(f"{self.endpoint}/moto-api/reset", timeout=30).raise_for_status()
        self.quotas, self.reservations = {}, []

    def reserve(self, **facts: str) -> None:
        """A capacity reservation, by the names of EC2's XML."""
        self.reservations.append("".join(f"<{name}>{value}</{name}>" for name, value in facts.items()))


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Aws]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    aws = Aws(f"http://{host}:{port}")

    def list_service_quotas(self: object) -> str:
        return json.dumps({"Quotas": [{"QuotaName": name, "Value": value} for name, value in aws.quotas.items()]})

    def describe_capacity_reservations(self: object) -> str:
        items = "".join(f"<item>{each}</item>" for each in aws.reservations)
        return (
            f"<DescribeCapacityReservationsResponse><capacityReservationSet>{items}</capacityReservationSet>"
            f"</DescribeCapacityReservationsResponse>"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServiceQuotasResponse, "list_service_quotas", list_service_quotas, raising=False)
        patch.setattr(EC2Response, "describe_capacity_reservations", describe_capacity_reservations, raising=False)
        yield aws
    server.stop()


@pytest.fixture
def aws(moto_server: Aws, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """An empty account that boto3, here and in programs that a test starts, takes for AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "simulated")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "simulated")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    moto_server.reset()
    yield moto_server
    moto_server.reset()


@pytest.fixture
def site(tmp_path: Path, programs: Programs, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Site:
    programs.add_real("terraform")
    programs.add_real("sh")
    site = Site(tmp_path, programs)
    monkeypatch.setenv("STACK", str(site.stack))
    monkeypatch.setenv("OVERLAY", str(site.overlay))
    monkeypatch.setenv("YES", "1")
    monkeypatch.setenv("SLOW", str(tmp_path / "slow"))
    monkeypatch.delenv("TF_CLI_CONFIG_FILE", raising=False)
    return site


@pytest.fixture
def cluster(site: Site, aws: Aws) -> Site:
    """An EKS cluster with a pool of two nodes in the account."""
    return make_cluster(site, aws)
