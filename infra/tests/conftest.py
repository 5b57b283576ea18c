"""A simulated AWS for the tests of the commands: moto's server on the loopback, in this process."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer
from moto.servicequotas.responses import ServiceQuotasResponse

from infra.account.session import STACK_TAG
from infra.tests.programs import Programs
from infra.tests.service_models import service_models
from infra.tests.site import EKS_STACK, Site, make_cluster
from tests.command import call

__all__ = ["service_models"]
REGION = "us-west-2"
ACCOUNT = "123456789012"  # moto's
ROLE = f"arn:aws:iam::{ACCOUNT}:role/any"
HAS_TERRAFORM = shutil.which("terraform") is not None
RunInfra = Callable[..., subprocess.CompletedProcess[str]]
MakeSite = Callable[[Mapping[str, str]], Site]
WriteValues = Callable[[str], None]
PLACE = f'region = "{REGION}"\nzone_id = "usw2-az4"\n'


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"), monkeypatch)


@pytest.fixture
def run_infra(capfd: pytest.CaptureFixture[str]) -> RunInfra:
    """Runs `python -m infra COMMAND` in this process, and fails unless it ends with `exit_code`."""
    if not HAS_TERRAFORM:
        pytest.skip("no terraform on PATH")

    def run(command: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = call(capfd, "infra.__main__", command)
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done

    return run


def tagged(kind: str, tags: dict[str, str]) -> dict[str, Any]:
    """The tags with which EC2 makes a resource of that kind."""
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


class Aws:
    """Clients of the simulated account, and what moto cannot do: quotas, capacity reservations."""

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

    def make_subnets(self, *zone_ids: str, tags: dict[str, str] | None = None) -> list[str]:
        """Makes a network with a subnet in each of the zones; returns the subnets' ids. `tags` are the network's."""
        ec2 = self.client("ec2")
        made = {"TagSpecifications": [tagged("vpc", tags)]} if tags else {}
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16", **made)["Vpc"]["VpcId"]
        subnets = [
            ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{number}.0/24", AvailabilityZoneId=zone)["Subnet"]
            for number, zone in enumerate(zone_ids)
        ]
        return [subnet["SubnetId"] for subnet in subnets]

    def make_cluster(self, subnets: list[str], **facts: str) -> None:
        network = {"subnetIds": subnets}
        self.client("eks").create_cluster(name="millrace", roleArn=ROLE, resourcesVpcConfig=network, **facts)

    def make_node_group(self, pool: str, subnets: list[str], size: int, is_ours: bool = True) -> None:
        """A node group of that name, which the stack tags and labels, unless others made it."""
        self.client("eks").create_nodegroup(
            clusterName="millrace",
            nodegroupName=pool,
            subnets=subnets,
            nodeRole=ROLE,
            labels={"millrace.dev/pool": pool} if is_ours else {},
            tags={STACK_TAG: "millrace"} if is_ours else {},
            scalingConfig={"minSize": 0, "desiredSize": size, "maxSize": 4},
        )

    def node_group_sizes(self) -> dict[str, int]:
        eks = self.client("eks")
        names = eks.list_nodegroups(clusterName="millrace")["nodegroups"]
        groups = [eks.describe_nodegroup(clusterName="millrace", nodegroupName=name)["nodegroup"] for name in names]
        return {group["nodegroupName"]: group["scalingConfig"]["desiredSize"] for group in groups}

    def run_instance(self, shape: str, tags: dict[str, str] | None = None, **place: str) -> str:
        """A running instance; its id."""
        made = {"TagSpecifications": [tagged("instance", tags)]} if tags else {}
        done = self.client("ec2").run_instances(
            ImageId="ami-12c6146b", InstanceType=shape, MinCount=1, MaxCount=1, **made, **place
        )
        return str(done["Instances"][0]["InstanceId"])

    def reserve(self, **facts: str) -> None:
        """A capacity reservation, by the names of EC2's XML."""
        self.reservations.append("".join(f"<{name}>{value}</{name}>" for name, value in facts.items()))


@pytest.fixture
def write_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteValues:
    """Writes the file that VARS names."""
    path = tmp_path / "mine.tfvars"
    monkeypatch.setenv("VARS", str(path))

    def write(text: str) -> None:
        path.write_text(f"{text}\n", encoding="utf-8")

    write("")
    return write


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
def make_site(tmp_path: Path, programs: Programs, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> MakeSite:
    def make(stack: Mapping[str, str]) -> Site:
        programs.add_real("terraform")
        programs.add_real("sh")
        site = Site(tmp_path, programs, stack)
        for name, value in (("STACK", site.stack), ("OVERLAY", site.overlay), ("YES", 1)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("SLOW", str(tmp_path / "slow"))
        monkeypatch.setattr("infra.teardown.leftovers.POLL_SECONDS", 0.0)
        monkeypatch.delenv("TF_CLI_CONFIG_FILE", raising=False)
        return site

    return make


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site(EKS_STACK)


@pytest.fixture
def cluster(site: Site, aws: Aws) -> Site:
    """An EKS cluster with a pool of two nodes in the account."""
    return make_cluster(site, aws)
