"""The Batch stack is applied to an AWS that runs here, found as it was meant, and destroyed without leftovers.

`make test-infra TF_PLUGIN_MIRROR=FOLDER`, as for the EKS stack (test_apply.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.batch.config import read_config
from infra.apply.renewal import list_renewed_pools, value_for_nodes
from infra.teardown.neighbours import find_in_account
from infra.tests.applied import ACCOUNT, APPLIES, REGION, Applied, apply_stack, destroy, list_left, simulated_aws

VARIABLES = {
    "region": REGION,
    "zone_id": "usw2-az4",
    "operators": [f"arn:aws:iam::{ACCOUNT}:role/research"],
    "budget": {"monthly_dollars": 5000, "emails": ["you@example.com"]},
    "hugging_face_secret": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hugging-face-AbCdEf",
    "webhook_secret": f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:notices-AbCdEf",
}

pytestmark = APPLIES


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    place = tmp_path_factory.mktemp("batch-apply")
    with simulated_aws(place) as endpoint:
        yield apply_stack("batch", VARIABLES, endpoint, place)


def environments_of(applied: Applied) -> dict[str, dict[str, Any]]:
    """Compute environments by the queue that they serve."""
    batch = applied.client("batch")
    made = {
        each["computeEnvironmentArn"]: each for each in batch.describe_compute_environments()["computeEnvironments"]
    }
    return {
        queue["jobQueueName"]: made[queue["computeEnvironmentOrder"][0]["computeEnvironment"]]
        for queue in batch.describe_job_queues()["jobQueues"]
    }


def test_nothing_that_the_stack_made_is_taken_for_somebody_elses(
    applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(find_in_account(applied.account(monkeypatch), "millrace")) == []


def test_deployments_read_what_the_stack_writes(applied: Applied, tmp_path: Path) -> None:
    path = tmp_path / "config.txt"
    path.write_text(applied.run("output", "-raw", "config"))
    config = read_config(path)
    assert (config.name, config.region) == ("millrace", REGION)
    assert config.ecr_repo == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/millrace"
    assert {config.trainium.name, config.cpu.name} == set(environments_of(applied))
    roles = {each["Arn"] for each in applied.client("iam").list_roles()["Roles"]}
    assert {*config.job_roles.values(), config.execution_role} <= roles
    assert config.webhook_secret == VARIABLES["webhook_secret"]
    groups = {each["logGroupName"]: each for each in applied.client("logs").describe_log_groups()["logGroups"]}
    assert {groups[name]["retentionInDays"] for name in config.log_groups.values()} == {90}
    repositories = {each["repositoryUri"] for each in applied.client("ecr").describe_repositories()["repositories"]}
    assert {config.image_of(stage) for stage in config.job_roles} == repositories


def test_containers_of_a_job_reach_one_another_in_whichever_group_aws_puts_them(applied: Applied) -> None:
    """The groups are those of the compute environment, of the node's launch template, or the VPC's default one."""
    ec2 = applied.client("ec2")
    cpu, trainium = (environments_of(applied)[f"millrace-{pool}"]["computeResources"] for pool in ("cpu", "trainium"))
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


def test_a_plan_tells_what_renews_nodes_from_what_does_not(applied: Applied) -> None:
    """Checks real plans of the provider. Its new launch template has a version that is not known yet."""
    address = 'module.batch.aws_batch_compute_environment.pool["trainium"]'
    plain, larger = (applied.plan_resource(address, *each) for each in ((), ("-var=trainium={max_nodes=8}",)))
    assert value_for_nodes(plain, "compute_resources") == value_for_nodes(larger, "compute_resources") != []
    assert address in list_renewed_pools(applied.plan("-var=checkpoint_gb=400"))


def test_destroy_leaves_data_until_it_is_told_to_and_then_nothing(applied: Applied) -> None:
    destroy(applied)

    assert list_left(applied) == {}
