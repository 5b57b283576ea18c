"""Describes and resizes EKS managed node groups, with errors that name the next step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from deploy.exit_codes import EXIT_AGAIN
from services.common.errors import DeviceError

# A call ends within the 30 s of a stage's Lease; otherwise another process would take over during the call.
CONNECT_SECONDS = 3
READ_SECONDS = 8
ATTEMPTS = 2  # botocore makes so many for one call
NODE_GROUP_LABEL = "eks.amazonaws.com/nodegroup"
"""The label with which EKS marks a Kubernetes node with its managed node group."""
BUSY = ("ResourceInUseException",)  # EKS makes one update of a group at a time
DENIED = ("AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "ExpiredTokenException")
USABLE = ("ACTIVE", "UPDATING", "DEGRADED")  # a group that could not start an instance is DEGRADED until it can


class NodeGroupError(DeviceError):
    """EKS refuses or fails a call."""


class NodeGroupBusy(NodeGroupError):
    """EKS is updating the node group already; the same call may succeed in a moment."""

    exit_code = EXIT_AGAIN


class EksUnreachable(NodeGroupError):
    """EKS does not answer, or throttles the account."""

    exit_code = EXIT_AGAIN


class NodeGroupAbsent(NodeGroupError):
    """The node group or its cluster does not exist."""


class NodeGroupDenied(NodeGroupError):
    """The IAM role does not allow the call."""


@dataclass(frozen=True)
class EksNodeGroup:
    """A managed node group as EKS describes it."""

    name: str
    """The cluster and the group, as CLUSTER/GROUP."""
    status: str
    desired_size: int
    min_size: int
    max_size: int
    instance_types: tuple[str, ...]
    """The instance types; empty where the launch template of the group sets them."""
    labels: dict[str, str]
    taints: tuple[dict[str, str], ...]
    """The taints in the notation of Kubernetes."""
    subnets: tuple[str, ...]
    issues: tuple[str, ...]
    """Health issues, which say why the group has fewer nodes than desired."""


def describe_node_group(name: str) -> EksNodeGroup:
    """Describe the node group CLUSTER/GROUP. Raises `NodeGroupError`."""
    cluster, group = split_name(name)
    with _explained("describe", name):
        found = _connect().describe_nodegroup(clusterName=cluster, nodegroupName=group)["nodegroup"]
    scaling, health = found["scalingConfig"], found.get("health") or {}
    return EksNodeGroup(
        name=name,
        status=found["status"],
        desired_size=scaling["desiredSize"],
        min_size=scaling["minSize"],
        max_size=scaling["maxSize"],
        instance_types=tuple(found.get("instanceTypes") or ()),
        labels=dict(found.get("labels") or {}),
        taints=tuple(map(_read_taint, found.get("taints") or ())),
        subnets=tuple(found.get("subnets") or ()),
        issues=tuple(f"{each['code']}: {each.get('message', '')}" for each in health.get("issues") or ()),
    )


def resize_node_group(name: str, desired: int) -> None:
    """Set the desired nodes of the group; EKS answers before it has them. Raises `NodeGroupError`."""
    cluster, group = split_name(name)
    with _explained("resize", name):
        _connect().update_nodegroup_config(
            clusterName=cluster, nodegroupName=group, scalingConfig={"desiredSize": desired}
        )


def describe_resize(name: str, desired: int) -> str:
    """The command with which a person resizes the node group."""
    cluster, group = split_name(name)
    return (
        f"aws eks update-nodegroup-config --cluster-name {cluster} --nodegroup-name {group} "
        f"--scaling-config desiredSize={desired}"
    )


def split_name(name: str) -> tuple[str, str]:
    """Split CLUSTER/GROUP into cluster and group. Raises `NodeGroupError` for any other text."""
    found = re.fullmatch(r"([\w-]+)/([\w-]+)", name)
    if not found:
        raise NodeGroupError(
            f"{name!r} names no node pool (expected: EKS cluster/managed node group, as in millrace/trainium). Correct "
            f"the annotation in the overlay, then: make cluster-up"
        )
    return found[1], found[2]


def _read_taint(taint: dict[str, str]) -> dict[str, str]:
    effect = "".join(word.capitalize() for word in taint["effect"].split("_"))  # NO_SCHEDULE is NoSchedule
    return {"key": taint["key"], "value": taint.get("value", ""), "effect": effect}


@cache
def _connect() -> Any:
    """A client with the account and the region of this pod, by its Pod Identity."""
    import boto3  # noqa: PLC0415 - it takes 0.7 s with its client, and only a deployment with a pool needs it
    from botocore.config import Config  # noqa: PLC0415

    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
    )
    # boto3 by itself reads AWS_DEFAULT_REGION alone.
    return boto3.client("eks", region_name=os.environ.get("AWS_REGION"), config=config)


@contextmanager
def _explained(call: str, name: str) -> Iterator[None]:
    """Turn the errors of botocore into `NodeGroupError`s that name the call and the node group."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError  # noqa: PLC0415

    try:
        yield
    except ClientError as error:
        raise _explain(call, name, error.response) from error
    except (NoCredentialsError, NoRegionError) as error:
        raise NodeGroupDenied(
            f"{call} node group {name}: this pod has no AWS account or region ({error}). The service accounts deployer "
            f"and reaper need a Pod Identity association (infra/modules/eks makes it), and its agent must run"
        ) from error
    except BotoCoreError as error:
        raise EksUnreachable(f"{call} node group {name}: EKS does not answer: {error}") from error


def _explain(call: str, name: str, response: dict[str, Any]) -> NodeGroupError:
    code, said = response.get("Error", {}).get("Code", ""), response.get("Error", {}).get("Message", "")
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    make: Callable[[str], NodeGroupError] = NodeGroupError
    advice = ""
    if code in BUSY:
        make = NodeGroupBusy
    elif code == "ResourceNotFoundException":
        make = NodeGroupAbsent
        advice = ". Correct CLUSTER_NAME and the names of the node groups in the overlay's settings.env"
    elif code in DENIED:
        make = NodeGroupDenied
        advice = (
            ". The roles of the service accounts deployer and reaper must allow eks:DescribeNodegroup and "
            "eks:UpdateNodegroupConfig on it (infra/modules/eks). If they do, the budget is spent, and its action has "
            f"attached the IAM policy {split_name(name)[0]}-{os.environ.get('AWS_REGION', 'REGION')}-over-budget. It "
            "stays on the roles until somebody resets the action in the console of AWS Budgets"
        )
    elif status >= 500 or "Throttl" in code or code == "TooManyRequestsException":
        make = EksUnreachable
    return make(f"{call} node group {name}: {code}: {said.rstrip('.')}{advice}")
