"""Checks whether the default security group of an existing VPC admits the traffic of a job's containers.

According to one of two AWS pages, containers on Batch's Trainium nodes are in that group (modules/batch cites both).
The stack opens the default group of a VPC that it makes; the owner of an existing VPC decides about its group.
"""

from __future__ import annotations

from typing import Any

from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.preflight.requirement import Finding, Look

EVERYTHING, EVERYWHERE = "-1", "0.0.0.0/0"
HTTPS = 443


def look_at_default_group(account: Account, inputs: Inputs) -> list[Look]:
    """Checks the default group; empty on EKS, and if the stack makes the VPC."""
    if inputs.has_cluster or not inputs.subnet_id:
        return []
    ec2 = account.client("ec2")
    [subnet] = ec2.describe_subnets(SubnetIds=[inputs.subnet_id])["Subnets"]
    vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=vpc)["SecurityGroups"]
    name, lacking = group["GroupId"], []
    itself = f"--group-id {name} --protocol -1 --source-group {name}"
    if not _lets_itself(group["IpPermissions"], name):
        lacking.append(("all traffic from itself", f"aws ec2 authorize-security-group-ingress {itself}"))
    if not _lets_itself(group["IpPermissionsEgress"], name):
        lacking.append(("all traffic to itself", f"aws ec2 authorize-security-group-egress {itself}"))
    if not any(_is_https_to_anywhere(rule) for rule in group["IpPermissionsEgress"]):
        https = f"--group-id {name} --protocol tcp --port 443 --cidr {EVERYWHERE}"
        lacking.append(("HTTPS to the internet", f"aws ec2 authorize-security-group-egress {https}"))
    where = f"security group {name}, the default one of {subnet['VpcId']}"
    findings = [
        Finding(
            what=f"containers on Trainium nodes, which may be in {name}, lack {what}",
            where=where,
            got="no such rule",
            expected=f"a rule for {what}: child nodes of a job join its main node, and stages call AWS",
            command=command,
        )
        for what, command in lacking
    ]
    seen = f"{name}, the default one of {subnet['VpcId']}, admits the containers' traffic"
    return [(seen if not findings else f"{name} lacks {', '.join(what for what, _ in lacking)}", findings)]


def _lets_itself(rules: list[dict[str, Any]], group: str) -> bool:
    """Whether a rule admits all traffic from the group itself or from everywhere."""
    return any(
        rule["IpProtocol"] == EVERYTHING
        and (
            any(pair.get("GroupId") == group for pair in rule.get("UserIdGroupPairs") or ())
            or any(block["CidrIp"] == EVERYWHERE for block in rule.get("IpRanges") or ())
        )
        for rule in rules
    )


def _is_https_to_anywhere(rule: dict[str, Any]) -> bool:
    """Whether the rule admits HTTPS to everywhere; a rule without ports admits all ports."""
    has_port = rule["IpProtocol"] == EVERYTHING or (
        rule["IpProtocol"] == "tcp" and rule["FromPort"] <= HTTPS <= rule["ToPort"]
    )
    return has_port and any(block["CidrIp"] == EVERYWHERE for block in rule.get("IpRanges") or ())
