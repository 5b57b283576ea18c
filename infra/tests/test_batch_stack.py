"""The commands with STACK=batch, before anything of it is made: what it costs, and what the account lacks for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from infra.apply.terraform import STACK
from infra.tests.conftest import REGION, Aws, RunInfra
from infra.tests.moto_batch import make_queue
from infra.tests.programs import Programs
from services.common.recipe.schema import STAGES

ZONE = "usw2-az4"
TAG = "1.0.0-neuron"
IMAGES = [f"millrace/{stage}" for stage in STAGES]
BATCH = STACK.parent / "batch"
GIVEN = BATCH / "tests/configs/given.txt"


@pytest.fixture
def on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK", "batch")
    monkeypatch.setenv("TF_VAR_region", REGION)
    monkeypatch.setenv("TF_VAR_zone_id", ZONE)


@pytest.mark.usefixtures("on_batch")
def test_batch_itself_costs_nothing(run_infra: RunInfra) -> None:
    done = run_infra("cost")

    assert "EKS control plane" not in done.stdout
    assert "core" not in done.stdout
    assert "1 x NAT gateway" in done.stdout
    assert "FSx for Lustre, 1,200 GiB" in done.stdout
    assert "4 x trn1.32xlarge (trainium)" in done.stdout


@pytest.mark.usefixtures("on_batch")
def test_what_is_there_already_is_not_paid_for_again(run_infra: RunInfra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_VAR_config", str(GIVEN))

    done = run_infra("cost")

    assert "NAT gateway   " not in done.stdout
    assert "FSx for Lustre" not in done.stdout


def test_both_stacks_have_one_file_of_common_variables() -> None:
    """`terraform test` checks their refusals in the EKS stack only."""
    for name in ("common.tf", "versions.tf"):
        assert (BATCH / name).samefile(STACK / name)


@pytest.fixture
def account(on_batch: None, aws: Aws, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """An account whose quotas have room for four Trainium nodes and four others."""
    programs.add_terraform("""echo '{"addresses_per_node": {"value": 24}}'""")
    monkeypatch.setenv("TAG", TAG)
    aws.publish_machine_images()
    aws.quotas |= {
        "Running On-Demand Trn instances": 512,
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 128,
    }
    return aws


def test_preflight_of_an_account_in_which_everything_fits(run_infra: RunInfra, account: Aws) -> None:
    [subnet] = account.make_subnets(ZONE)
    make_queue(account.client, "millrace-cpu")
    make_queue(account.client, "millrace-trainium", [subnet])
    make_queue(account.client, "other-trainium", stack="other")
    account.push_images(*IMAGES, tag=TAG)

    done = run_infra("preflight")

    assert re.search("instances: 128 vCPU, 0 .*, 4 x m7i.8xlarge .* 128\n", done.stdout)
    assert re.search(rf"{subnet} has 251 free, 96 .* 4 nodes", done.stdout)
    assert re.search(r"queues +millrace-cpu .*\n +millrace-trainium ", done.stdout)
    assert "3 of 3 tags are in ECR" in done.stdout
    assert "head" not in done.stdout
    assert "other-" not in done.stdout


def test_preflight_names_an_ami_whose_driver_nobody_knows(
    run_infra: RunInfra, account: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = account.publish_image("al2023-ami-ecs-neuron-hvm-2023.0.20260820-kernel-6.1-x86_64")
    monkeypatch.setenv("TF_VAR_ami_id", newest)

    done = run_infra("preflight", exit_code=4)

    assert f"20260820-kernel-6.1-x86_64 ({newest})" in done.stderr
    assert "next      leave ami_id out, for the default; or look up its aws-neuronx-dkms in https://" in done.stderr


def test_preflight_names_an_environment_whose_nodes_start_from_another_ami(run_infra: RunInfra, account: Aws) -> None:
    """An earlier apply took the newest AMI of its day."""
    newest = account.publish_image("al2023-ami-ecs-neuron-hvm-2023.0.20260820-kernel-6.1-x86_64")
    make_queue(account.client, "millrace-trainium", account.make_subnets(ZONE), ami_id=newest)
    account.push_images(*IMAGES, tag=TAG)

    done = run_infra("preflight", exit_code=4)

    assert "where     compute environment millrace-trainium\n" in done.stderr
    assert "next      make infra-up STACK=batch, with no job" in done.stderr


def test_preflight_names_what_the_default_group_of_a_given_vpc_lacks(
    run_infra: RunInfra, account: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AWS makes it open towards itself and everywhere; a careful owner closes it. moto makes no rule towards itself."""
    [subnet], ec2 = account.make_subnets(ZONE), account.client("ec2")
    config = tmp_path / "config.txt"
    config.write_text(f"REGION={REGION}\nSUBNET={subnet}\n")
    monkeypatch.setenv("TF_VAR_config", str(config))
    vpc = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0]["VpcId"]
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    itself = f"--group-id {group['GroupId']} --protocol -1 --source-group {group['GroupId']}"
    run_cli(ec2, f"aws ec2 authorize-security-group-ingress {itself}")

    done = run_infra("preflight")

    [group] = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    assert f"groups      {group['GroupId']}, the default one of {vpc}, " in done.stdout

    ec2.revoke_security_group_egress(GroupId=group["GroupId"], IpPermissions=group["IpPermissionsEgress"])
    ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=group["IpPermissions"])

    done = run_infra("preflight", exit_code=4)

    assert "3 requirements are not met" in done.stderr
    commands = [line.split("next      ")[1] for line in done.stderr.splitlines() if "next      " in line]
    for command in commands:
        run_cli(ec2, command)
    run_infra("preflight")


def run_cli(ec2: Any, command: str) -> None:
    """Carries out an `aws ec2` command that changes a rule."""
    words = command.split()
    options = dict(zip(words[3::2], words[4::2], strict=True))
    rule: dict[str, Any] = {"IpProtocol": options["--protocol"]}
    if "--source-group" in options:
        rule["UserIdGroupPairs"] = [{"GroupId": options["--source-group"]}]
    else:
        port = int(options["--port"])
        rule |= {"FromPort": port, "ToPort": port, "IpRanges": [{"CidrIp": options["--cidr"]}]}
    getattr(ec2, words[2].replace("-", "_"))(GroupId=options["--group-id"], IpPermissions=[rule])


def test_preflight_names_a_queue_that_gives_no_job_to_nodes(run_infra: RunInfra, account: Aws) -> None:
    """Batch shows the reason only there, and the jobs stay RUNNABLE."""
    make_queue(account.client, "millrace-trainium", account.make_subnets("usw2-az1"))
    account.client("batch").update_job_queue(jobQueue="millrace-trainium", state="DISABLED")
    account.push_images(*IMAGES, tag=TAG)

    done = run_infra("preflight", exit_code=4)

    assert "2 requirements are not met" in done.stderr
    assert "got       job queue millrace-trainium is DISABLED and VALID: " in done.stderr
    assert "where     the compute environment of job queue millrace-trainium, subnet-" in done.stderr
    assert f"expected  one subnet in {ZONE}" in done.stderr


def test_preflight_looks_into_a_registry_that_is_given(
    run_infra: RunInfra, account: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.txt"
    config.write_text(f"REGION={REGION}\nECR_REPO=123456789012.dkr.ecr.{REGION}.amazonaws.com/ml/llama\n")
    monkeypatch.setenv("TF_VAR_config", str(config))
    account.push_images("ml/llama/tokenizer", "ml/llama/compiler", tag=TAG)

    done = run_infra("preflight", exit_code=4)

    assert "no repository for ml/llama/trainer" in done.stderr
    assert "next      aws ecr create-repository --repository-name ml/llama/trainer" in done.stderr
    assert "1 requirement is not met" in done.stderr
