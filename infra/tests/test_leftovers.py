"""The report names what is in the account of a stack, whoever made it, and nothing of another stack."""

from __future__ import annotations

import json
import re

import pytest

from infra.account.session import STACK_TAG
from infra.tests.conftest import PLACE, Aws, RunInfra, WriteValues, tagged

TAG = {"Key": STACK_TAG, "Value": "millrace"}
DENIAL = {"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "ec2:*", "Resource": "*"}]}
OTHER = {"Key": STACK_TAG, "Value": "other"}


@pytest.fixture(autouse=True)
def place(write_values: WriteValues) -> None:
    write_values(PLACE)


def test_everything_that_costs_is_named_with_its_price(run_infra: RunInfra, aws: Aws) -> None:
    ec2 = aws.client("ec2")
    names = aws.make_subnets("usw2-az1", "usw2-az2", tags={STACK_TAG: "millrace"})
    [vpc] = {each["VpcId"] for each in ec2.describe_subnets(SubnetIds=names)["Subnets"]}
    aws.make_subnets(tags={STACK_TAG: "other"})
    interface = ec2.create_network_interface(
        SubnetId=names[0],
        TagSpecifications=[tagged("network-interface", {"cluster.k8s.amazonaws.com/name": "millrace"})],
    )["NetworkInterface"]["NetworkInterfaceId"]
    of_cluster = tagged("volume", {"kubernetes.io/cluster/millrace": "owned"})
    volume = ec2.create_volume(AvailabilityZone="us-west-2a", Size=100, TagSpecifications=[of_cluster])["VolumeId"]
    of_stack = tagged("natgateway", {STACK_TAG: "millrace"})
    gateway = ec2.create_nat_gateway(SubnetId=names[0], TagSpecifications=[of_stack])["NatGateway"]
    instance = aws.run_instance("trn1.32xlarge", {"eks:cluster-name": "millrace"})
    aws.make_cluster(names)
    aws.client("elbv2").create_load_balancer(Name="of-a-service", Subnets=names, Tags=of_cluster["Tags"])
    for name in ("/aws/eks/millrace/cluster", "/aws/containerinsights/millrace/performance", "/aws/eks/other/cluster"):
        aws.client("logs").create_log_group(logGroupName=name)
    aws.client("ecr").create_repository(repositoryName="millrace/head", tags=[TAG])
    aws.client("ecr").create_repository(repositoryName="other/head", tags=[OTHER])
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="artifacts", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_bucket_tagging(Bucket="artifacts", Tagging={"TagSet": [TAG]})
    file_system = aws.client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        StorageCapacity=1200,
        SubnetIds=[names[0]],
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250},
        Tags=[TAG],
    )["FileSystem"]["FileSystemId"]

    kms, tags = aws.client("kms"), [{"TagKey": STACK_TAG, "TagValue": "millrace"}]
    key, going = (kms.create_key(Tags=tags)["KeyMetadata"]["KeyId"] for _ in range(2))
    kms.schedule_key_deletion(KeyId=going)

    done = run_infra("leftovers")

    lines = {line.split("  ")[1].strip() + " " + line[17:].split()[0]: line for line in done.stdout.splitlines()[1:-1]}
    assert re.match(r"14 .* millrace in us-west-2; .* us-east-1, not this region's", done.stdout)
    expected = {
        "EKS cluster millrace": "$73.00/month",
        f"instance {instance}": "$15,695.00/month  trn1.32xlarge, running",
        f"volume {volume}": "$8.00/month  100 GiB, available",
        f"interface {interface}": "$0.00/month  unused; ",
        "load balancer of-a-service": "$16.43/month  of a Service",
        f"NAT gateway {gateway['NatGatewayId']}": "$36.50/month",
        f"FSx {file_system}": "$252.00/month  1200 GiB  data",
        "ECR millrace/head": "by use  images  data",
        "bucket artifacts": "by use  objects  data",
        "log group /aws/eks/millrace/cluster": "0.0 GB",
        "log group /aws/containerinsights/millrace/performance": "0.0 GB",
        f"ec2 vpc/{vpc}": "",
        f"kms key/{key}": "$1.00/month",
        f"kms key/{going}": "$0.00/month  AWS deletes it within 30 days",
    }
    assert lines.keys() == expected.keys()
    assert [name for name, said in expected.items() if said not in lines[name]] == []
    assert "other" not in done.stdout
    assert "$16,081.92/month" in done.stdout.splitlines()[-1]


def test_what_no_tag_finds_is_found_by_its_name(run_infra: RunInfra, aws: Aws) -> None:
    assert run_infra("leftovers").stdout == "no resource of millrace is left in us-west-2\n"
    iam = aws.client("iam")
    document = json.dumps(DENIAL)
    # More than a page of an answer.
    names = [f"millrace-us-west-2-{number}" for number in range(120)]
    for name in [*names, "millrace-us-east-2-node", "other-us-west-2-node"]:
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=document)
    for name in ("millrace-us-west-2-over-budget", "other-us-west-2-over-budget"):
        iam.create_policy(PolicyName=name, PolicyDocument=document)

    done = run_infra("leftovers")

    lines = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert sorted(line[2] for line in lines if line[:2] == ["IAM", "role"]) == sorted(names)
    [policy] = [line for line in lines if line[:2] == ["IAM", "policy"]]
    assert policy[2:] == ["millrace-us-west-2-over-budget", "$0.00/month"]
    assert len(lines) == len(names) + 1


def test_a_network_that_does_not_answer_is_worth_another_try(
    run_infra: RunInfra, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    run_infra("leftovers", exit_code=75)
