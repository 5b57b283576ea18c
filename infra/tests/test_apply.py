"""Both stacks are applied to an AWS that runs here, found as they were meant, and destroyed without leftovers.

`make test-infra TF_PLUGIN_MIRROR=FOLDER`; a folder that `terraform providers mirror` fills. Minutes, most of them the
provider's own waits. The AWS is moto with additions: it checks calls and their order, not what AWS would accept.
"""

from __future__ import annotations

import base64
import email
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.batch.config import read_config
from infra.account.cluster_resources import list_node_groups
from infra.apply.renewal import list_renewed_pools, value_for_nodes
from infra.apply.terraform import type_of
from infra.teardown.neighbours import find_in_account
from infra.tests.applied import ACCOUNT, APPLIES, REGION, Applied, apply_stack, destroy, list_left, simulated_aws
from services.common.hardware.instance_types import default_lustre_size

BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/boundary"
VARIABLES = {
    "region": REGION,
    "zone_id": "usw2-az4",
    "operators": [f"arn:aws:iam::{ACCOUNT}:role/research"],
    "budget": {"monthly_dollars": 5000, "emails": ["you@example.com"]},
    "permissions_boundary": BOUNDARY,
}
SECRETS = {
    "hugging_face_secret": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hugging-face-AbCdEf",
    "webhook_secret": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:notices-AbCdEf",
}

pytestmark = APPLIES


@pytest.fixture(scope="module")
def eks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    place = tmp_path_factory.mktemp("eks")
    with simulated_aws(place) as endpoint:
        yield apply_stack("eks", VARIABLES | {"api_public_cidrs": ["203.0.113.7/32"]}, endpoint, place)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    place = tmp_path_factory.mktemp("batch")
    with simulated_aws(place) as endpoint:
        yield apply_stack("batch", VARIABLES | SECRETS, endpoint, place)


@pytest.fixture(params=["eks", "batch"])
def applied(request: pytest.FixtureRequest) -> Applied:
    """Each of the two stacks."""
    stack: Applied = request.getfixturevalue(request.param)
    return stack


def environments_of(batch: Applied) -> dict[str, dict[str, Any]]:
    """Compute environments by the queue that they serve."""
    client = batch.client("batch")
    made = {
        each["computeEnvironmentArn"]: each for each in client.describe_compute_environments()["computeEnvironments"]
    }
    return {
        queue["jobQueueName"]: made[queue["computeEnvironmentOrder"][0]["computeEnvironment"]]
        for queue in client.describe_job_queues()["jobQueues"]
    }


def test_nothing_that_a_stack_made_is_taken_for_somebody_elses(
    applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything has the stack's tag from terraform's provider; otherwise infra-down would refuse."""
    assert list(find_in_account(applied.account(monkeypatch), "millrace")) == []


def test_the_node_groups_of_a_stack_are_known_for_its_own(eks: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {group.name: group.stack for group in list_node_groups(eks.account(monkeypatch), "millrace")}
    assert groups == dict.fromkeys(("core", "cpu", "trainium"), "millrace")


def test_every_role_has_the_permissions_boundary(applied: Applied) -> None:
    """As its user asks for; without one an account that demands it refuses the role."""
    iam = applied.client("iam")
    names = [each["RoleName"] for each in iam.list_roles()["Roles"] if "/aws-service-role/" not in each["Path"]]
    assert len(names) > 5
    bounds = [iam.get_role(RoleName=name)["Role"].get("PermissionsBoundary", {}) for name in names]
    assert [each.get("PermissionsBoundaryArn") for each in bounds] == [BOUNDARY] * len(names)


def user_data_of(applied: Applied) -> list[dict[str, str]]:
    """The parts of the user data of each launch template that has some, by their types."""
    ec2 = applied.client("ec2")
    found = []
    for template in ec2.describe_launch_templates()["LaunchTemplates"]:
        [version] = ec2.describe_launch_template_versions(
            LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"]
        )["LaunchTemplateVersions"]
        if text := version["LaunchTemplateData"].get("UserData"):
            message = email.message_from_bytes(base64.b64decode(text))
            parts = [part for part in message.walk() if not part.is_multipart()]
            found.append({part.get_content_type(): str(part.get_payload()) for part in parts})
    return found


def test_user_data_is_a_message_of_the_parts_that_its_reader_takes(eks: Applied, batch: Applied) -> None:
    """Batch adds its own part to a MIME message only; on EKS nodeadm reads a NodeConfig beside the script."""
    assert [[*parts] for parts in user_data_of(batch)] == [["text/x-shellscript"]] * 2
    [parts] = [each for each in user_data_of(eks) if "text/x-shellscript" in each]
    assert [*parts] == ["text/x-shellscript", "application/node.eks.aws"]
    assert parts["text/x-shellscript"].startswith("#!/bin/bash")
    documents = [each for each in yaml.safe_load_all(parts["application/node.eks.aws"]) if each]
    assert [each["kind"] for each in documents] == ["NodeConfig"]


def test_a_deployments_nodes_are_not_taken_back_by_the_next_apply(eks: Applied) -> None:
    scaling = {"desiredSize": 3}
    eks.client("eks").update_nodegroup_config(clusterName="millrace", nodegroupName="trainium", scalingConfig=scaling)
    planned = eks.plan_resource("module.trainium.aws_eks_node_group.this")
    assert planned["scaling_config"][0]["desired_size"] == 3


def test_a_plan_tells_what_renews_nodes_of_a_group_from_what_does_not(eks: Applied) -> None:
    """Checks real plans of the provider."""
    options = ((), ("-var=trainium={max_nodes=8}",), ("-var=ami_release=20260610",))
    plain, larger, newer = (eks.plan_resource("module.trainium.aws_eks_node_group.this", *each) for each in options)
    assert [key for key in plain if larger.get(key) != plain[key]] == ["scaling_config"]
    assert [key for key in plain if newer.get(key) != plain[key]] == ["release_version"]


def test_a_plan_tells_what_renews_nodes_of_a_compute_environment_from_what_does_not(batch: Applied) -> None:
    """Checks real plans of the provider. Its new launch template has a version that is not known yet."""
    address = 'module.batch.aws_batch_compute_environment.pool["trainium"]'
    plain, larger = (batch.plan_resource(address, *each) for each in ((), ("-var=trainium={max_nodes=8}",)))
    assert value_for_nodes(plain, "compute_resources") == value_for_nodes(larger, "compute_resources") != []
    assert address in list_renewed_pools(batch.plan("-var=checkpoint_gb=400"))


def test_another_zone_is_known_to_lose_the_file_system(eks: Applied) -> None:
    """Checks a real plan of the provider."""
    lost = [each.address for each in eks.plan("-var=zone_id=usw2-az1").changes if each.is_loss_of_data]
    assert lost == ["module.storage.aws_fsx_lustre_file_system.this[0]"]


def test_the_file_system_has_the_speed_that_the_plan_assumes_and_gets_another_in_place(eks: Applied) -> None:
    [made] = eks.client("fsx").describe_file_systems()["FileSystems"]
    default = default_lustre_size()
    assert made["StorageCapacity"] == default.gib
    assert made["LustreConfiguration"]["PerUnitStorageThroughput"] == default.megabytes_per_second_per_tib

    changes = {each.address: each for each in eks.plan("-var=fsx={throughput=125}").changes}
    assert changes["module.storage.aws_fsx_lustre_file_system.this[0]"].actions == ("update",)


def test_deployments_read_what_the_stack_writes(batch: Applied, tmp_path: Path) -> None:
    path = tmp_path / "config.txt"
    path.write_text(batch.run("output", "-raw", "config"))
    config = read_config(path)
    assert (config.name, config.region) == ("millrace", REGION)
    assert config.ecr_repo == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/millrace"
    assert {config.trainium.name, config.cpu.name} == set(environments_of(batch))
    roles = {each["Arn"] for each in batch.client("iam").list_roles()["Roles"]}
    assert {*config.job_roles.values(), config.execution_role} <= roles
    assert config.webhook_secret == SECRETS["webhook_secret"]
    groups = {each["logGroupName"]: each for each in batch.client("logs").describe_log_groups()["logGroups"]}
    assert {groups[name]["retentionInDays"] for name in config.log_groups.values()} == {90}
    repositories = {each["repositoryUri"] for each in batch.client("ecr").describe_repositories()["repositories"]}
    assert {config.image_of(stage) for stage in config.job_roles} == repositories


def test_containers_of_a_job_reach_one_another_in_whichever_group_aws_puts_them(batch: Applied) -> None:
    """The groups are those of the compute environment, of the node's launch template, or the VPC's default one."""
    ec2 = batch.client("ec2")
    cpu, trainium = (environments_of(batch)[f"millrace-{pool}"]["computeResources"] for pool in ("cpu", "trainium"))
    [vpc] = {each["VpcId"] for each in ec2.describe_subnets(SubnetIds=trainium["subnets"])["Subnets"]}
    of_vpc = [{"Name": "vpc-id", "Values": [vpc]}]
    groups = {each["GroupId"]: each for each in ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]}
    names = {each["GroupName"]: name for name, each in groups.items()}
    of_nodes = {names[f"millrace-{name}"] for name in ("efa", "fsx", "nodes")}
    assert set(cpu["securityGroupIds"]) == of_nodes
    assert not trainium.get("securityGroupIds")
    for name in (names["default"], names["millrace-nodes"]):
        inward, outward = groups[name]["IpPermissions"], groups[name]["IpPermissionsEgress"]
        assert [pair["GroupId"] for rule in inward for pair in rule["UserIdGroupPairs"]] == [name]
        assert {rule["IpProtocol"] for rule in inward} == {"-1"}
        assert sorted((rule["IpProtocol"], rule.get("FromPort", -1)) for rule in outward) == [("-1", -1), ("tcp", 443)]


def test_infra_down_leaves_the_data_and_the_network_that_holds_it(eks: Applied) -> None:
    changes = eks.plan_down()
    assert [each.address for each in changes if each.is_loss_of_data] == []
    gone = {type_of(each.address) for each in changes}
    assert {"aws_eks_cluster", "aws_eks_node_group", "aws_nat_gateway", "aws_eip"} <= gone
    assert {"aws_vpc", "aws_subnet"}.isdisjoint(gone)


def test_destroy_leaves_data_until_it_is_told_to_and_then_nothing(applied: Applied) -> None:
    roles = {each["RoleName"] for each in applied.client("iam").list_roles()["Roles"]}
    if "millrace-us-west-2-deployer" in roles:  # the budget acts, of which terraform knows nothing
        arn = f"arn:aws:iam::{ACCOUNT}:policy/millrace-us-west-2-over-budget"
        applied.client("iam").attach_role_policy(RoleName="millrace-us-west-2-deployer", PolicyArn=arn)

    destroy(applied)

    assert list_left(applied) == {}
