"""Preflight names what would stop a cluster or a deployment, in the account as it is, and changes nothing."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from images.platforms import SERVICES
from infra.account.session import STACK_TAG
from infra.apply.inputs import read_inputs
from infra.preflight.capacity_reservation import judge_reservation
from infra.tests.conftest import REGION, Aws, RunInfra
from infra.tests.programs import Programs

ZONE = "usw2-az4"
QUOTA = "Running On-Demand Trn instances"
STANDARD = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
TAGS = {STACK_TAG: "millrace"}
VARIABLES = f"""
region   = "{REGION}"
name     = "millrace"
zone_id  = "{ZONE}"
trainium = {{ shape = "trn1.32xlarge", max_nodes = 4 }}
cpu_nodes = {{ shape = "m7i.8xlarge", max_nodes = 2 }}
core_nodes = {{ shape = "m7i.2xlarge", nodes = 2 }}
"""
RESERVED = 'capacity = {{ kind = "{}", reservation_id = "cr-1", ends_at = "{}" }}\n'


@pytest.fixture(autouse=True)
def machine_images(aws: Aws) -> None:
    aws.publish_machine_images()


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.tfvars"
    path.write_text(VARIABLES, encoding="utf-8")
    monkeypatch.setenv("VARS", str(path))
    monkeypatch.setenv("TAG", "1.0.0-neuron")
    return path


@pytest.fixture
def terraform(programs: Programs) -> Programs:
    """A terraform in whose state the stack is applied."""
    programs.add_terraform("""echo '{"addresses_per_node": {"value": 24}}'""")
    return programs


@pytest.fixture
def fitting(aws: Aws, variables: Path, terraform: Programs) -> Aws:
    """An account in which four nodes fit, with the images in it."""
    aws.quotas |= {QUOTA: 512, STANDARD: 80}
    aws.push_images(*(f"millrace/{service}" for service in SERVICES), tag="1.0.0-neuron")
    return aws


def make_cluster(
    aws: Aws, cidr: str, zones: tuple[str, ...] = (ZONE,), version: str = "1.34", release: str = "1.34.7-20260505"
) -> list[str]:
    """Makes an EKS cluster with a Trainium node group in new subnets of those zones, and returns the subnets' ids."""
    subnets = aws.make_subnets(*zones, cidr=cidr)
    aws.make_cluster(subnets, version=version)
    aws.make_node_group("trainium", subnets, size=0, releaseVersion=release)
    return subnets


def test_an_account_in_which_everything_fits(run_infra: RunInfra, fitting: Aws) -> None:
    [subnet] = make_cluster(fitting, "10.0.{}.0/24")

    done = run_infra("preflight")

    assert "account     123456789012 as arn:aws:sts::123456789012:user/moto, us-west-2" in done.stdout
    assert f"trn1.32xlarge is offered in usw2-az1, {ZONE}" in done.stdout
    for shape in ("m7i.8xlarge", "m7i.2xlarge"):
        assert f"{shape} is offered in usw2-az1, usw2-az2, usw2-az3, {ZONE}; chosen is {ZONE}" in done.stdout
    for quota, nodes in (
        (f"{QUOTA}: 512", "4 x trn1.32xlarge"),
        (f"{STANDARD}: 80", "2 x m7i.2xlarge and 2 x m7i.8xlarge"),
    ):
        vcpus = quota.rpartition(" ")[2]
        assert re.search(rf"{re.escape(quota)} vCPU, 0 .*, {nodes} .* {vcpus}$", done.stdout, re.MULTILINE)
    assert re.search(rf"{subnet} has 251 free, 96 .* 4 nodes", done.stdout)
    assert "4 of 4 tags are in ECR" in done.stdout
    assert re.search(r"1\.34 .* standard support until 2026-12-02.* \$0\.60 .*EXTENDED", done.stdout)
    assert "1.34.7-20260505 has Neuron driver 2.27.4.0" in done.stdout
    assert "            node group trainium has 1.34.7-20260505\n" in done.stdout
    assert re.search(r"add-ons +1 pinned; .*: addon_versions = { vpc-cni = \"v1\.2\.0-eksbuild\.1\", ", done.stdout)
    assert "NOT MET" not in done.stdout


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ('ami_release = "1.34.9-20260714"', "Neuron driver of 1.34.9-20260714"),
        ('ami_release = "1.34.9-20260625"', "no machine image 1.34.9-20260625"),
        ('kubernetes_version = "1.36"', "no release .* Kubernetes 1.36"),
        (
            'trainium = { shape = "trn2.48xlarge", max_nodes = 1 }',
            "images for trn2.48xlarge do not accept the Neuron driver 2.27.4.0 of 1.34.7-20260505",
        ),
        ('addon_versions = { coredns = "v9" }', "no v9 of add-on coredns"),
    ],
)
def test_what_does_not_fit_the_images_or_eks_is_named(
    run_infra: RunInfra, fitting: Aws, variables: Path, values: str, said: str
) -> None:
    """The second release is in the table, and the region has none of it."""
    kept = [line for line in VARIABLES.splitlines() if line.partition(" ")[0] != values.partition(" ")[0]]
    variables.write_text("\n".join([*kept, values, ""]), encoding="utf-8")

    done = run_infra("preflight", exit_code=4)

    assert re.search(f"  - .*{said}", done.stderr)
    assert "infra/aws_releases.json" in done.stderr or "images/platforms.toml" in done.stderr


def test_nodes_of_a_release_whose_driver_is_too_new_are_named(run_infra: RunInfra, fitting: Aws) -> None:
    """The group was made before the stack pinned its release."""
    make_cluster(fitting, "10.0.{}.0/24", release="1.34.9-20260714")

    done = run_infra("preflight", exit_code=4)

    assert re.search(r"  - .*Neuron driver of 1\.34\.9-20260714", done.stderr)
    assert "where     node group trainium\n" in done.stderr
    assert "aws-neuronx-dkms from 2.27.4.0 on and before 2.29" in done.stderr


@pytest.mark.parametrize(
    ("status", "policy", "is_refused", "said"),
    [
        (
            "EXTENDED_SUPPORT",
            "STANDARD",
            True,
            'next      kubernetes_version = 1.35; or kubernetes_support = "EXTENDED"',
        ),
        ("EXTENDED_SUPPORT", "EXTENDED", False, "1.34 is EXTENDED_SUPPORT"),
        ("UNSUPPORTED", "EXTENDED", True, "next      kubernetes_version = 1.35\n"),
    ],
)
def test_a_version_of_kubernetes_that_leaves_its_support_is_named(
    run_infra: RunInfra,
    fitting: Aws,
    variables: Path,
    status: str,
    policy: str,
    is_refused: bool,
    said: str,
) -> None:
    fitting.kubernetes["1.34"] = (status, datetime(2026, 12, 2, tzinfo=UTC))
    variables.write_text(f'{VARIABLES}kubernetes_support = "{policy}"\n', encoding="utf-8")

    done = run_infra("preflight", exit_code=4 if is_refused else 0)

    assert ("standard support of Kubernetes 1.34" in done.stderr) == is_refused
    assert said in done.stdout + done.stderr


def test_a_cluster_that_eks_has_upgraded_is_named(run_infra: RunInfra, fitting: Aws) -> None:
    make_cluster(fitting, "10.0.{}.0/24", version="1.35")

    done = run_infra("preflight", exit_code=4)

    assert "got       1.35\n      expected  1.34\n" in done.stderr
    assert 'next      kubernetes_version = "1.35"' in done.stderr


def test_before_the_first_infra_up_nothing_of_it_is_missed(run_infra: RunInfra, aws: Aws, variables: Path) -> None:
    aws.quotas |= {QUOTA: 512, STANDARD: 80}

    done = run_infra("preflight")

    assert "no Trainium subnet yet" in done.stdout
    repositories = ", ".join(f"millrace/{service}" for service in sorted(SERVICES))
    assert re.search(rf"0 of 4 tags are in ECR; .*{repositories}", done.stdout)


def test_a_checkout_without_the_stacks_state_does_not_judge_addresses(
    run_infra: RunInfra, fitting: Aws, terraform: Programs
) -> None:
    make_cluster(fitting, "10.0.{}.0/28")
    terraform.add_terraform("echo '{}'")

    done = run_infra("preflight")

    assert "11 free; " in done.stdout


def test_everything_that_does_not_fit_is_named_at_once(
    run_infra: RunInfra, aws: Aws, variables: Path, terraform: Programs
) -> None:
    values = VARIABLES.replace(ZONE, "usw2-az3").replace("m7i.2xlarge", "m7i.4xlarge")
    variables.write_text(values, encoding="utf-8")
    aws.quotas |= {QUOTA: 128, STANDARD: 5}  # the second is what a new account has
    make_cluster(aws, "10.0.{}.0/28", zones=("usw2-az3",))
    aws.client("ecr").create_repository(repositoryName="millrace/head")

    done = run_infra("preflight", exit_code=4)

    assert "8 requirements are not met" in done.stderr
    assert "usw2-az3 does not offer trn1.32xlarge" in done.stderr
    assert f"expected  one of usw2-az1, {ZONE}" in done.stderr
    assert re.search("quota of 128 vCPU .* 4 x trn1.32xlarge", done.stderr)
    assert "expected  512 or more" in done.stderr
    assert re.search("quota of 5 vCPU .* 2 x m7i.4xlarge and 2 x m7i.8xlarge", done.stderr)
    assert "expected  96 or more" in done.stderr
    assert "has too few addresses for 4 x trn1.32xlarge" in done.stderr
    assert "got       11 free\n      expected  96: 4 nodes of 24 addresses" in done.stderr
    assert "no image millrace/head:1.0.0-neuron" in done.stderr
    assert "next      make images STAGE=head VARIANT=neuron PUSH=" in done.stderr
    for service in ("tokenizer", "compiler", "trainer"):
        assert f"no repository for millrace/{service}" in done.stderr


def test_a_zone_that_lacks_a_cpu_type_is_refused(run_infra: RunInfra, fitting: Aws, variables: Path) -> None:
    """EC2 may withdraw a type after `shapes.json` was written."""
    variables.write_text(VARIABLES.replace("m7i.8xlarge", "trn1n.32xlarge").replace(ZONE, "usw2-az1"), encoding="utf-8")

    done = run_infra("preflight", exit_code=4)

    assert "zone        trn1.32xlarge is offered in usw2-az1, usw2-az4; chosen is usw2-az1\n" in done.stdout
    assert "            NOT MET: trn1n.32xlarge is offered in usw2-az4; chosen is usw2-az1\n" in done.stdout
    assert "usw2-az1 does not offer trn1n.32xlarge" in done.stderr


def test_what_others_run_counts_against_the_quota(run_infra: RunInfra, fitting: Aws) -> None:
    fitting.run_instance("trn1.32xlarge")
    fitting.run_instance("m7i.8xlarge")

    done = run_infra("preflight", exit_code=4)

    assert re.search(r"got       512, of which 128 .*\n      expected  640 or more", done.stderr)
    assert re.search(r"got       80, of which 32 .*\n      expected  112 or more", done.stderr)


def test_the_stacks_own_nodes_count_neither_against_the_quota_nor_the_addresses(
    run_infra: RunInfra, fitting: Aws
) -> None:
    make_cluster(fitting, "10.0.{}.0/26")  # 59 addresses: two nodes'
    for shape in ("trn1.32xlarge", "trn1.32xlarge", "m7i.2xlarge", "m7i.2xlarge"):
        fitting.run_instance(shape, TAGS)

    done = run_infra("preflight")

    assert f"{QUOTA}: 512 vCPU, 0 " in done.stdout
    assert re.search("59 free, 48 .* 2 nodes", done.stdout)


def test_a_pool_over_two_zones_is_refused(run_infra: RunInfra, fitting: Aws) -> None:
    make_cluster(fitting, "10.0.{}.0/24", zones=(ZONE, "usw2-az1"))

    done = run_infra("preflight", exit_code=4)

    assert f"got       usw2-az1, {ZONE}\n      expected  one subnet in {ZONE}" in done.stderr


def test_a_reservation_that_fits(run_infra: RunInfra, fitting: Aws, variables: Path) -> None:
    """A block's vCPU count against no quota, and EKS removes its nodes 40 minutes before its end."""
    fitting.quotas[QUOTA] = 0
    end = datetime.now(UTC) + timedelta(hours=30)
    variables.write_text(VARIABLES + RESERVED.format("capacity_block", f"{end:%Y-%m-%dT%H:%M:%SZ}"), encoding="utf-8")
    reserve(fitting, reservationType="capacity-block", endDate=f"{end:%Y-%m-%dT%H:%M:%S.000Z}")

    done = run_infra("preflight")

    until = end - timedelta(minutes=40)
    assert f"cr-1: 4 of 4 free, until {until:%Y-%m-%d %H:%M} UTC" in done.stdout


AN_END = datetime(2026, 2, 1, 11, 30, tzinfo=UTC)
TOO_FEW = "got       1 free, 2 already used by this stack\n      expected  4 or more"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"InstanceType": "trn1n.32xlarge"}, "is for another type"),
        ({"AvailabilityZoneId": "usw2-az1"}, "is in another zone"),
        ({"State": "expired"}, "cannot be used now"),
        ({"AvailableInstanceCount": 1}, TOO_FEW),
        ({"ReservationType": "capacity-block"}, "of another kind"),
        (
            {"StartDate": datetime(2026, 1, 5, tzinfo=UTC), "State": "scheduled", "AvailableInstanceCount": 0},
            "it begins at 2026-01-05 00:00 UTC",
        ),
        ({"EndDate": AN_END + timedelta(minutes=2)}, 'next      capacity.ends_at = "2026-02-01T11:32:00Z"'),
        ({"EndDate": None}, "got       EndDate none\n      expected  capacity.ends_at, 2026-02-01T11:30:00Z"),
    ],
)
def test_a_reservation_that_does_not_fit(facts: dict[str, object], said: str) -> None:
    [found] = judge(facts)

    assert said in found
    assert judge({}) == judge({"EndDate": AN_END + timedelta(seconds=59)}) == []
    [over] = judge({"EndDate": datetime(2026, 1, 1, tzinfo=UTC)}, ends_at="2026-01-01T00:00:00+00:00")
    assert "usable until 2026-01-01 00:00 UTC" in over


def judge(facts: dict[str, object], ends_at: str = "2026-02-01T11:30:00Z") -> list[str]:
    """Findings for 4 nodes, of which 2 are up, in a reservation that fits except for `facts`."""
    variables = {
        "region": REGION,
        "zone_id": ZONE,
        "trainium": {"shape": "trn1.32xlarge", "max_nodes": 4},
        "cpu_nodes": {"shape": "m7i.8xlarge", "max_nodes": 2},
        "core_nodes": {"shape": "m7i.2xlarge", "nodes": 2},
        "capacity": {"kind": "reservation", "reservation_id": "cr-1", "ends_at": ends_at},
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
    return [each.text for each in judge_reservation(fitting | facts, read_inputs(variables), 4, 2, now)[1]]


def reserve(aws: Aws, **facts: str) -> None:
    fitting = {
        "capacityReservationId": "cr-1",
        "instanceType": "trn1.32xlarge",
        "availabilityZoneId": ZONE,
        "state": "active",
        "totalInstanceCount": "4",
        "availableInstanceCount": "4",
    }
    aws.reserve(**fitting | facts)


def test_without_credentials_it_says_how_to_sign_in(
    run_infra: RunInfra, aws: Aws, variables: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    done = run_infra("preflight", exit_code=4)

    assert "aws sso login" in done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("# nothing yet\n", "terraform.tfvars"),
        ("region = {\n", "/mine.tfvars:2"),
        (VARIABLES + RESERVED.format("reservation", "tomorrow"), 'capacity.ends_at = "tomorrow"'),
    ],
)
def test_a_file_without_choices_hcl_or_sense_is_named(
    run_infra: RunInfra, variables: Path, values: str, said: str
) -> None:
    variables.write_text(values, encoding="utf-8")

    done = run_infra("preflight", exit_code=2)

    assert said in done.stderr
