"""Checks whether the default security group of an existing VPC admits the traffic of a job's containers.

According to one of two AWS pages, containers on Batch's Trainium nodes are in that group (modules/batch cites both).
The stack opens the default group of a VPC that it makes; the owner of an existing VPC decides about its group.
"""

from __future__ import annotations

from typing import Any

from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.preflight.requirement import CheckResult, Finding

EVERYTHING, EVERYWHERE = "-1", "0.0.0.0/0"
HTTPS = 443


def check_default_group(account: Account, inputs: Inputs) -> list[CheckResult]:
    """Checks the default group; empty on EKS, and if the stack makes the VPC."""
    if inputs.has_cluster or not inputs.subnet_id:
        return []
    ec2 = account.client("ec2")
    [subnet] = ec2.describe_subnets(SubnetIds=[inputs.subnet_id])["Subnets"]
    vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=vpc)["SecurityGroups"]
    name, inward, outward = group["GroupId"], group["IpPermissions"], group["IpPermissionsEgress"]
    itself = f"--group-id {name} --protocol -1 --source-group {name}"
    https = f"--group-id {name} --protocol tcp --port {HTTPS} --cidr {EVERYWHERE}"
    rules = (
        ("all traffic from itself", f"ingress {itself}", any(_admits_itself(rule, name) for rule in inward)),
        ("all traffic to itself", f"egress {itself}", any(_admits_itself(rule, name) for rule in outward)),
        ("HTTPS to the internet", f"egress {https}", any(_admits_https(rule) for rule in outward)),
    )
    where = f"security group {name}, the default one of {subnet['VpcId']}"
    findings = [
        Finding(
            what=f"containers on Trainium nodes, which may be in {name}, lack {what}",
            where=where,
            got="no such rule",
            expected=f"a rule for {what}: child nodes of a job join its main node, and stages call AWS",
            command=f"aws ec2 authorize-security-group-{options}",
        )
        for what, options, is_there in rules
        if not is_there
    ]
    state = f"lacks {len(findings)} of {len(rules)} rules for" if findings else "admits"
    return [(f"{name}, the default one of {subnet['VpcId']}, {state} the containers' traffic", findings)]


def _admits_itself(rule: dict[str, Any], group: str) -> bool:
    """Whether the rule admits all traffic from the group itself or from everywhere."""
    is_itself = any(pair.get("GroupId") == group for pair in rule.get("UserIdGroupPairs") or ())
    return rule["IpProtocol"] == EVERYTHING and (is_itself or _is_for_everywhere(rule))


def _admits_https(rule: dict[str, Any]) -> bool:
    """Whether the rule admits HTTPS to everywhere; a rule for all protocols has no ports."""
    is_tcp = rule["IpProtocol"] == "tcp" and rule["FromPort"] <= HTTPS <= rule["ToPort"]
    return (is_tcp or rule["IpProtocol"] == EVERYTHING) and _is_for_everywhere(rule)


def _is_for_everywhere(rule: dict[str, Any]) -> bool:
    return any(block["CidrIp"] == EVERYWHERE for block in rule.get("IpRanges") or ())
