"""The Batch stack is applied to an AWS that runs here, found as it was meant, and destroyed without leftovers.

`make test-infra TF_PLUGIN_MIRROR=FOLDER`, as for the EKS stack (test_apply.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from deploy.batch.config import read_config
from infra.apply.terraform import type_of
from infra.shapes import find_shape
from infra.teardown.neighbours import find_in_account
from infra.tests.applied import ACCOUNT, APPLIES, REGION, Applied, apply_stack, simulated_aws
from infra.tests.fakeaws.shim import TRAINIUM_AMI

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
    assert find_in_account(applied.account(monkeypatch), "millrace", lambda service: False) == []


def test_deployments_read_what_the_stack_writes(applied: Applied, tmp_path: Path) -> None:
    path = tmp_path / "config.txt"
    path.write_text(applied.run("output", "-raw", "config"))
    config = read_config(path)
    assert (config.name, config.region) == ("millrace", REGION)
    assert config.repository == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/millrace"
    assert {config.trainium.name, config.cpu.name} == set(environments_of(applied))
    roles = {each["Arn"] for each in applied.client("iam").list_roles()["Roles"]}
    assert {*config.job_roles.values(), config.execution_role} <= roles
    assert config.webhook_secret == VARIABLES["webhook_secret"]
    groups = {each["logGroupName"]: each for each in applied.client("logs").describe_log_groups()["logGroups"]}
    assert {groups[name]["retentionInDays"] for name in config.log_groups.values()} == {90}
    repositories = {each["repositoryUri"] for each in applied.client("ecr").describe_repositories()["repositories"]}
    assert {config.image_of(stage) for stage in config.job_roles} == repositories


def test_no_node_is_there_before_a_job_is(applied: Applied) -> None:
    resources = {queue: each["computeResources"] for queue, each in environments_of(applied).items()}
    trainium, cpu = find_shape("trn1.32xlarge"), find_shape("m7i.8xlarge")
    assert {queue: (each["minvCpus"], each["maxvCpus"]) for queue, each in resources.items()} == {
        "millrace-trainium": (0, 4 * trainium.vcpus),
        "millrace-cpu": (0, 4 * cpu.vcpus),
    }
    assert resources["millrace-trainium"]["placementGroup"] == "millrace-trainium"
    assert applied.client("ec2").describe_instances()["Reservations"] == []


def test_trainium_nodes_start_with_every_efa_card_and_the_ami_with_neuron(applied: Applied) -> None:
    resources = environments_of(applied)["millrace-trainium"]["computeResources"]
    template = resources["launchTemplate"]
    [version] = applied.client("ec2").describe_launch_template_versions(
        LaunchTemplateId=template["launchTemplateId"], Versions=[template["version"]]
    )["LaunchTemplateVersions"]
    interfaces = version["LaunchTemplateData"]["NetworkInterfaces"]
    assert sorted((int(each["NetworkCardIndex"]), int(each["DeviceIndex"])) for each in interfaces) == [
        (card, 0 if card == 0 else 1) for card in range(find_shape("trn1.32xlarge").efa_cards)
    ]
    assert [each["imageIdOverride"] for each in resources["ec2Configuration"]] == [TRAINIUM_AMI]


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
    """Checks real plans of the provider. moto forgets some values, which every plan then changes as well."""
    address = 'module.batch.aws_batch_compute_environment.pool["trainium"]'

    def changed(*options: str) -> frozenset[str]:
        found = [each for each in applied.plan(*options).changes if each.address == address]
        return found[0].changed if found else frozenset()

    forgotten = changed()
    assert changed("-var=trainium={max_nodes=8}") - forgotten == {"compute_resources.max_vcpus"}
    assert "compute_resources.launch_template.version" in changed("-var=checkpoint_gb=400")


def test_a_job_that_is_stuck_is_cancelled(applied: Applied) -> None:
    queues = applied.client("batch").describe_job_queues()["jobQueues"]
    reasons = {each["reason"] for queue in queues for each in queue["jobStateTimeLimitActions"]}
    assert [len(queue["jobStateTimeLimitActions"]) for queue in queues] == [3, 3]
    assert reasons == {
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
    }


def test_infra_down_leaves_the_data_and_the_network_that_holds_it(applied: Applied) -> None:
    changes = applied.plan_down()
    assert [each.address for each in changes if each.is_loss_of_data] == []
    gone = {type_of(each.address) for each in changes}
    assert {"aws_batch_job_queue", "aws_batch_compute_environment", "aws_nat_gateway", "aws_eip"} <= gone
    assert {"aws_vpc", "aws_subnet"}.isdisjoint(gone)


def test_destroy_leaves_data_until_it_is_told_to_and_then_nothing(applied: Applied) -> None:
    bucket = json.loads(applied.run("output", "-json", "bucket"))
    # moto reads no condition of a policy, so that denying what is not encrypted on its way denies everything.
    applied.client("s3").delete_bucket_policy(Bucket=bucket)
    applied.client("s3").put_object(Bucket=bucket, Key="checkpoint/run/step-00000100/manifest.json", Body=b"{}")
    # The provider waits for ten minutes after it has deleted a file system, whatever the API says.
    applied.run("state", "rm", "module.storage.aws_fsx_lustre_file_system.this[0]")

    refused = applied.terraform("destroy", "-input=false", "-auto-approve", "-parallelism=20")
    assert refused.returncode == 1
    assert "BucketNotEmpty" in refused.stderr
    assert applied.client("batch").describe_job_queues()["jobQueues"] == []

    address = "module.storage.aws_s3_bucket.this"
    applied.run("apply", "-input=false", "-auto-approve", "-var=keep_data=false", f"-target={address}")
    applied.run("destroy", "-input=false", "-auto-approve", "-var=keep_data=false")
    assert applied.run("state", "list") == ""
    with pytest.raises(ClientError, match="Not Found"):
        applied.client("s3").head_bucket(Bucket=bucket)
    roles = applied.client("iam").list_roles()["Roles"]
    left = {
        "vpcs": [each for each in applied.client("ec2").describe_vpcs()["Vpcs"] if not each["IsDefault"]],
        "addresses": applied.client("ec2").describe_addresses()["Addresses"],
        "placement groups": applied.client("ec2").describe_placement_groups()["PlacementGroups"],
        "templates": applied.client("ec2").describe_launch_templates()["LaunchTemplates"],
        "environments": applied.client("batch").describe_compute_environments()["computeEnvironments"],
        "repositories": applied.client("ecr").describe_repositories()["repositories"],
        "roles": [each["RoleName"] for each in roles if not each["RoleName"].startswith("AWSServiceRole")],
        "profiles": applied.client("iam").list_instance_profiles()["InstanceProfiles"],
        "log groups": applied.client("logs").describe_log_groups()["logGroups"],
        "topics": applied.client("sns").list_topics()["Topics"],
        "budgets": applied.client("budgets").describe_budgets(AccountId=ACCOUNT)["Budgets"],
    }
    assert {name: found for name, found in left.items() if found} == {}
