"""Preflight names what would stop a cluster or a deployment, in the account as it is, and changes nothing."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.account.session import STACK_TAG
from infra.apply.inputs import read_inputs
from infra.apply.terraform import STACK
from infra.preflight.checks import check_reservation
from infra.tests.conftest import PLACE, REGION, Aws, RunInfra, WriteValues

ZONE = "usw2-az4"
QUOTA = "Running On-Demand Trn instances"
STANDARD = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
VARIABLES = f"{PLACE}cpu_nodes = {{ max_nodes = 2 }}\n"
RESERVED = 'capacity = {{ kind = "{}", reservation_id = "cr-1", ends_at = "{}" }}\n'


@pytest.fixture
def variables(write_values: WriteValues) -> WriteValues:
    write_values(VARIABLES)
    return write_values


@pytest.fixture
def fitting(aws: Aws, variables: WriteValues) -> Aws:
    """An account in which four nodes fit."""
    aws.quotas |= {QUOTA: 512, STANDARD: 80}
    return aws


@pytest.fixture
def on_batch(fitting: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("STACK", "batch")
    return fitting


def test_an_account_in_which_everything_fits(run_infra: RunInfra, fitting: Aws) -> None:
    done = run_infra("preflight")

    assert "account     123456789012 as arn:aws:sts::123456789012:user/moto, us-west-2" in done.stdout
    for quota, nodes in (
        (f"{QUOTA}: 512", "4 x trn1.32xlarge"),
        (f"{STANDARD}: 80", "2 x m7i.2xlarge and 2 x m7i.8xlarge"),
    ):
        vcpus = quota.rpartition(" ")[2]
        assert re.search(rf"{re.escape(quota)} vCPU, 0 .*, {nodes} .* {vcpus}$", done.stdout, re.MULTILINE)
    assert "accept the Neuron driver of 20260505" in done.stdout
    assert "NOT MET" not in done.stdout


@pytest.mark.parametrize("shape", ["trn2.48xlarge", "trn2u.48xlarge"])
def test_trn2_has_a_machine_image_of_its_own(
    run_infra: RunInfra, fitting: Aws, variables: WriteValues, shape: str
) -> None:
    fitting.quotas[QUOTA] = 768
    variables(f'{VARIABLES}trainium = {{ shape = "{shape}" }}\n')

    done = run_infra("preflight")

    assert f"images compute on {shape}, and accept the Neuron driver of 20261119" in done.stdout


def test_batch_needs_no_core_nodes(run_infra: RunInfra, on_batch: Aws) -> None:
    on_batch.quotas[STANDARD] = 64

    done = run_infra("preflight")

    assert re.search(r"64 vCPU, 0 .*, 2 x m7i\.8xlarge need 64\n", done.stdout)
    assert "accept the Neuron driver of al2023-ami-ecs-neuron" in done.stdout


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ('ami_release = "20260714"', "no AMI release 20260714 for trn1.32xlarge"),
        ('ami_release = "20261119"', "no AMI release 20261119 for trn1.32xlarge"),
    ],
)
def test_what_does_not_fit_the_images_is_named(
    run_infra: RunInfra, fitting: Aws, variables: WriteValues, values: str, said: str
) -> None:
    kept = [line for line in VARIABLES.splitlines() if line.partition(" ")[0] != values.partition(" ")[0]]
    variables("\n".join([*kept, values, ""]))

    done = run_infra("preflight", exit_code=4)

    assert re.search(f"  - .*{said}", done.stderr)


def test_everything_that_does_not_fit_is_named_at_once(run_infra: RunInfra, aws: Aws, variables: WriteValues) -> None:
    """What others run counts against a quota, and the stack's own nodes do not."""
    aws.quotas |= {QUOTA: 512, STANDARD: 5}  # the second is what a new account has
    aws.run_instance("trn1.32xlarge")
    for _ in range(2):
        aws.run_instance("trn1.32xlarge", {STACK_TAG: "millrace"})

    done = run_infra("preflight", exit_code=4)

    assert "2 requirements are not met" in done.stderr
    assert re.search("512 vCPU, 128 .* 4 x trn1.32xlarge .*, expected 640 or more", done.stderr)
    assert re.search("5 vCPU, 0 .* 2 x m7i.2xlarge and 2 x m7i.8xlarge .*, expected 80 or more", done.stderr)


def test_a_reservation_that_fits(run_infra: RunInfra, fitting: Aws, variables: WriteValues) -> None:
    """A block's vCPU count against no quota, and EKS removes its nodes 40 minutes before its end."""
    fitting.quotas[QUOTA] = 0
    end = datetime.now(UTC) + timedelta(hours=30)
    variables(VARIABLES + RESERVED.format("capacity_block", f"{end:%Y-%m-%dT%H:%M:%SZ}"))
    fitting.reserve(
        capacityReservationId="cr-1",
        instanceType="trn1.32xlarge",
        availabilityZoneId=ZONE,
        state="active",
        totalInstanceCount="4",
        availableInstanceCount="4",
        reservationType="capacity-block",
        endDate=f"{end:%Y-%m-%dT%H:%M:%S.000Z}",
    )

    done = run_infra("preflight")

    until = end - timedelta(minutes=40)
    assert f"cr-1: 4 of 4 free, until {until:%Y-%m-%d %H:%M} UTC" in done.stdout


AN_END = datetime(2026, 2, 1, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, []),
        ({"EndDate": AN_END + timedelta(seconds=59)}, []),
        ({"InstanceType": "trn1n.32xlarge"}, ['trainium.shape = "trn1n.32xlarge"']),
        ({"AvailabilityZoneId": "usw2-az1"}, ['zone_id = "usw2-az1"']),
        ({"ReservationType": "capacity-block"}, ['capacity.kind = "capacity_block"']),
        ({"State": "expired"}, ["it is expired"]),
        ({"AvailableInstanceCount": 1}, ["1 free nodes, and 2 that this stack uses, expected 4"]),
        (
            {"StartDate": datetime(2026, 1, 5, tzinfo=UTC), "State": "scheduled", "AvailableInstanceCount": 0},
            ["it is scheduled until 2026-01-05 00:00 UTC"],
        ),
        ({"EndDate": AN_END + timedelta(minutes=2)}, ['capacity.ends_at = "2026-02-01T11:32:00Z"']),
        ({"EndDate": None}, ['capacity.ends_at = ""']),
        ({"EndDate": datetime(2026, 1, 1, tzinfo=UTC)}, ["2026-01-01T00:00:00Z", "usable until 2026-01-01 00:00 UTC"]),
    ],
)
def test_a_reservation_that_does_not_fit(facts: dict[str, Any], said: list[str]) -> None:
    """4 nodes are asked for, of which 2 are up, in a reservation that fits except for `facts`."""
    variables = {
        "region": REGION,
        "zone_id": ZONE,
        "trainium": {"shape": "trn1.32xlarge", "max_nodes": 4},
        "cpu_nodes": {"shape": "m7i.8xlarge", "max_nodes": 2},
        "capacity": {"kind": "reservation", "reservation_id": "cr-1", "ends_at": "2026-02-01T11:30:00Z"},
    }
    fitting = {
        "InstanceType": "trn1.32xlarge",
        "AvailabilityZoneId": ZONE,
        "State": "active",
        "TotalInstanceCount": 4,
        "AvailableInstanceCount": 2,
        "StartDate": datetime(2026, 1, 1, tzinfo=UTC),
        "EndDate": AN_END,
    }
    now = datetime(2026, 1, 2, tzinfo=UTC)
    _, found = check_reservation(fitting | facts, read_inputs(variables), 4, 2, now)

    assert len(found) == len(said)
    assert all(words in each for words, each in zip(said, found, strict=True))


def test_what_the_default_group_of_a_given_vpc_lacks_is_named_with_the_commands_that_add_it(
    run_infra: RunInfra, on_batch: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AWS makes it open towards itself and everywhere; a careful owner closes it."""
    [subnet], ec2 = on_batch.make_subnets(ZONE), on_batch.client("ec2")
    config = tmp_path / "config.txt"
    config.write_text(f"REGION={REGION}\nSUBNET={subnet}\n")
    monkeypatch.setenv("TF_VAR_config", str(config))
    vpc = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"]
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    ec2.revoke_security_group_egress(GroupId=group["GroupId"], IpPermissions=group["IpPermissionsEgress"])

    done = run_infra("preflight", exit_code=4)

    assert len(re.findall(f"aws ec2 authorize-security-group-.* --group-id {group['GroupId']} ", done.stderr)) == 3
    everything = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}]
    web = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=everything)
    ec2.authorize_security_group_egress(GroupId=group["GroupId"], IpPermissions=[*everything, web])
    run_infra("preflight")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("# nothing yet", "terraform.tfvars"),
        (VARIABLES + RESERVED.format("reservation", "tomorrow"), 'capacity.ends_at = "tomorrow"'),
    ],
)
def test_a_stack_without_choices_or_sense_is_refused(
    run_infra: RunInfra, variables: WriteValues, values: str, said: str
) -> None:
    variables(values)
    assert said in run_infra("preflight", exit_code=2).stderr


@pytest.mark.parametrize("stack", ["eks", "batch"])
@pytest.mark.parametrize("command", ["preflight", "up"])
def test_a_value_of_the_example_that_has_to_be_ones_own_is_refused(
    run_infra: RunInfra, variables: WriteValues, monkeypatch: pytest.MonkeyPatch, stack: str, command: str
) -> None:
    """Also those in the example's comments. The price needs none of them."""
    text = (STACK.parent / stack / "terraform.tfvars.example").read_text(encoding="utf-8")
    values = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    monkeypatch.setenv("STACK", stack)
    variables(values)
    said = run_infra(command, exit_code=2).stderr
    kept = {REGION, ZONE, "trn1.32xlarge", "m7i.8xlarge", "20260610", "capacity_block"}
    own = {*re.findall(r'"([^"]*)"', values)} - kept - {"2027-01-31T11:30:00Z"}
    assert len(own) >= 4
    assert {*re.findall(r'"([^"]*)"', said)} == own
    run_infra("cost")
