"""Checks whether the default security group of an existing VPC admits the traffic of a job's containers.

According to one of two AWS pages, containers on Batch's Trainium nodes are in that group (modules/batch cites both).
The stack opens the default group of a VPC that it makes; the owner of an existing VPC decides about its group.
"""

from __future__ import annotations

from typing import Any

from infra.account.session import Account
from infra.preflight.requirement import CheckResult

ALL, INTERNET = "-1", "0.0.0.0/0"


def check_default_group(account: Account, subnet_id: str) -> CheckResult:
    """Checks the default group of the subnet's VPC for traffic from and to itself, and HTTPS to the internet."""
    ec2 = account.client("ec2")
    [subnet] = ec2.describe_subnets(SubnetIds=[subnet_id])["Subnets"]
    of_vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    name, inward, outward = group["GroupId"], group["IpPermissions"], group["IpPermissionsEgress"]
    wanted = {
        f"ingress --group-id {name} --protocol -1 --source-group {name}": _admits(inward, name, ALL),
        f"egress --group-id {name} --protocol -1 --source-group {name}": _admits(outward, name, ALL),
        f"egress --group-id {name} --protocol tcp --port 443 --cidr {INTERNET}": _admits(outward, "", "tcp"),
    }
    seen = f"{name}, the default one of {subnet['VpcId']}"
    return seen, [
        f"security group {seen}, in which containers on Trainium nodes may be, lacks a rule: "
        f"aws ec2 authorize-security-group-{command}"
        for command, is_there in wanted.items()
        if not is_there
    ]


def _admits(rules: list[dict[str, Any]], group: str, protocol: str) -> bool:
    """Whether a rule admits the protocol, and of TCP port 443, from or to the group or everywhere."""
    return any(
        rule["IpProtocol"] in (protocol, ALL)
        and (rule["IpProtocol"] == ALL or rule["FromPort"] <= 443 <= rule["ToPort"])
        and (
            any(pair["GroupId"] == group for pair in rule["UserIdGroupPairs"])
            or any(each["CidrIp"] == INTERNET for each in rule["IpRanges"])
        )
        for rule in rules
    )
