"""EKS managed node groups: the two calls that a deployment makes, with errors a user can act on."""

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

# A call ends within the 30 s for which a stage's Lease holds, else another process takes over in the middle of it.
CONNECT_SECONDS = 3
READ_SECONDS = 8
ATTEMPTS = 2  # of a call, within botocore
# A Kubernetes node's label, which EKS sets: the managed node group that it is of.
NODE_GROUP_LABEL = "eks.amazonaws.com/nodegroup"
BUSY = ("ResourceInUseException",)  # EKS makes one update of a group at a time
DENIED = ("AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "ExpiredTokenException")
USABLE = ("ACTIVE", "UPDATING", "DEGRADED")  # a group that could not have an instance is DEGRADED until it can


class NodeGroupError(DeviceError):
    """EKS does not do what it is asked for."""


class NodeGroupBusy(NodeGroupError):
    """It updates the group already: the same call in a moment."""

    exit_code = EXIT_AGAIN


class EksUnreachable(NodeGroupError):
    """It does not answer, or has too much to do."""

    exit_code = EXIT_AGAIN


class NodeGroupAbsent(NodeGroupError):
    """There is no such group, or no such cluster."""


class NodeGroupDenied(NodeGroupError):
    """The account's role does not allow it."""


@dataclass(frozen=True)
class NodeGroup:
    """A managed node group as EKS describes it."""

    name: str
    """CLUSTER/GROUP."""
    status: str
    desired: int
    least: int
    most: int
    instance_types: tuple[str, ...]
    """Empty where its launch template says them."""
    labels: dict[str, str]
    taints: tuple[dict[str, str], ...]
    """As Kubernetes writes them."""
    subnets: tuple[str, ...]
    issues: tuple[str, ...]
    """Of its health: why it has fewer nodes than it should."""


def describe_node_group(name: str) -> NodeGroup:
    """The group CLUSTER/GROUP. Raises `NodeGroupError`."""
    cluster, group = split_name(name)
    with _explained("describe", name):
        found = _connect().describe_nodegroup(clusterName=cluster, nodegroupName=group)["nodegroup"]
    scaling, health = found["scalingConfig"], found.get("health") or {}
    return NodeGroup(
        name=name,
        status=found["status"],
        desired=scaling["desiredSize"],
        least=scaling["minSize"],
        most=scaling["maxSize"],
        instance_types=tuple(found.get("instanceTypes") or ()),
        labels=dict(found.get("labels") or {}),
        taints=tuple(map(_read_taint, found.get("taints") or ())),
        subnets=tuple(found.get("subnets") or ()),
        issues=tuple(f"{each['code']}: {each.get('message', '')}" for each in health.get("issues") or ()),
    )


def resize_node_group(name: str, desired: int) -> None:
    """Ask for so many nodes; EKS answers before it has them. Raises `NodeGroupBusy` and other `NodeGroupError`."""
    cluster, group = split_name(name)
    with _explained("resize", name):
        _connect().update_nodegroup_config(
            clusterName=cluster, nodegroupName=group, scalingConfig={"desiredSize": desired}
        )


def describe_resize(name: str, desired: int) -> str:
    """The command of a person who does it."""
    cluster, group = split_name(name)
    return (
        f"aws eks update-nodegroup-config --cluster-name {cluster} --nodegroup-name {group} "
        f"--scaling-config desiredSize={desired}"
    )


def split_name(name: str) -> tuple[str, str]:
    """Cluster and group. Raises `NodeGroupError` for what names neither."""
    found = re.fullmatch(r"([\w-]+)/([\w-]+)", name)
    if not found:
        raise NodeGroupError(
            f"{name!r} names no node pool (expected: EKS cluster/managed node group, as in millrace/trainium). Mend "
            f"the annotation in the overlay, then: make cluster-up"
        )
    return found[1], found[2]


def _read_taint(taint: dict[str, str]) -> dict[str, str]:
    effect = "".join(word.capitalize() for word in taint["effect"].split("_"))  # NO_SCHEDULE is NoSchedule
    return {"key": taint["key"], "value": taint.get("value", ""), "effect": effect}


@cache
def _connect() -> Any:
    """The account and the region of this pod, by its Pod Identity."""
    import boto3  # noqa: PLC0415 - 0.7 s with its client, which only a deployment with a pool needs
    from botocore.config import Config  # noqa: PLC0415

    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
    )
    # boto3 itself reads AWS_DEFAULT_REGION alone.
    return boto3.client("eks", region_name=os.environ.get("AWS_REGION"), config=config)


@contextmanager
def _explained(what: str, name: str) -> Iterator[None]:
    """Turn what botocore raises into errors that say what was asked for."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError  # noqa: PLC0415

    try:
        yield
    except ClientError as error:
        raise _explain(what, name, error.response) from error
    except (NoCredentialsError, NoRegionError) as error:
        raise NodeGroupDenied(
            f"{what} node group {name}: this pod has no AWS account or region ({error}). The service accounts deployer "
            f"and reaper need a Pod Identity association (infra/modules/eks makes it), and its agent must run"
        ) from error
    except BotoCoreError as error:
        raise EksUnreachable(f"{what} node group {name}: EKS does not answer: {error}") from error


def _explain(what: str, name: str, response: dict[str, Any]) -> NodeGroupError:
    code, said = response.get("Error", {}).get("Code", ""), response.get("Error", {}).get("Message", "")
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    make: Callable[[str], NodeGroupError] = NodeGroupError
    advice = ""
    if code in BUSY:
        make = NodeGroupBusy
    elif code == "ResourceNotFoundException":
        make = NodeGroupAbsent
        advice = ". CLUSTER_NAME and the groups' names in the overlay's settings.env are those of the infrastructure"
    elif code in DENIED:
        make = NodeGroupDenied
        advice = (
            ". The roles of the service accounts deployer and reaper must allow eks:DescribeNodegroup and "
            "eks:UpdateNodegroupConfig on it (infra/modules/eks), or the budget's action denies it: IAM policy "
            f"{split_name(name)[0]}-{os.environ.get('AWS_REGION', 'REGION')}-over-budget, which stays "
            "on the role until somebody resets the action in the console of AWS Budgets"
        )
    elif status >= 500 or "Throttl" in code or code == "TooManyRequestsException":
        make = EksUnreachable
    return make(f"{what} node group {name}: {code}: {said.rstrip('.')}{advice}")
