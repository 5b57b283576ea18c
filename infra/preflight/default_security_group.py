"""Checks whether the default security group of an existing VPC admits the traffic of a job's containers.

According to one of two AWS pages, containers on Batch's Trainium nodes are in that group (modules/batch cites both).
The stack opens the default group of a VPC that it makes; the owner of an existing VPC decides about its group.
"""

from __future__ import annotations

from typing import Any

from infra.account.session import Account
from infra.preflight.requirement import CheckResult

EVERYTHING, EVERYWHERE, HTTPS = "-1", "0.0.0.0/0", 443


def check_default_group(account: Account, subnet_id: str) -> CheckResult:
    """Checks the default group of the subnet's VPC for traffic from and to itself, and HTTPS to the internet."""
    ec2 = account.client("ec2")
    [subnet] = ec2.describe_subnets(SubnetIds=[subnet_id])["Subnets"]
    of_vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    name = group["GroupId"]
    of_group = [{"Name": "group-id", "Values": [name]}]
    rules = list(account.pages("ec2", "describe_security_group_rules", "SecurityGroupRules", Filters=of_group))
    inward, outward = ([each for each in rules if each["IsEgress"] == is_out] for is_out in (False, True))
    itself = f"--group-id {name} --protocol -1 --source-group {name}"
    https = f"--group-id {name} --protocol tcp --port {HTTPS} --cidr {EVERYWHERE}"
    wanted = (
        ("all traffic from itself", f"ingress {itself}", any(_admits_all(rule, name) for rule in inward)),
        ("all traffic to itself", f"egress {itself}", any(_admits_all(rule, name) for rule in outward)),
        ("HTTPS to the internet", f"egress {https}", any(_admits_https(rule) for rule in outward)),
    )
    return f"{name}, the default one of {subnet['VpcId']}", [
        f"security group {name}, the default one of {subnet['VpcId']}, in which containers on Trainium nodes may be, "
        f"lacks a rule for {what}: aws ec2 authorize-security-group-{command}"
        for what, command, is_there in wanted
        if not is_there
    ]


def _admits_all(rule: dict[str, Any], group: str) -> bool:
    """Whether the rule admits all traffic from the group itself or from everywhere."""
    is_itself = rule.get("ReferencedGroupInfo", {}).get("GroupId") == group
    return rule["IpProtocol"] == EVERYTHING and (is_itself or rule.get("CidrIpv4") == EVERYWHERE)


def _admits_https(rule: dict[str, Any]) -> bool:
    is_tcp = rule["IpProtocol"] == "tcp" and rule["FromPort"] <= HTTPS <= rule["ToPort"]
    return (is_tcp or rule["IpProtocol"] == EVERYTHING) and rule.get("CidrIpv4") == EVERYWHERE
