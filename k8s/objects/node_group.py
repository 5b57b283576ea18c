"""EKS managed node groups: their size, which a pod with an AWS role describes and changes, and their Lease.

The Lease of a group names the one stage or one-off for which the group is scaled up. Whoever scales a group up takes
its Lease first and deletes it after scaling down, so the next process of the holder, or the reaper, knows what to scale
down after a crash. It does not expire.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from deploy.exit_codes import EXIT_AGAIN
from k8s.objects.api import Api, has_condition
from k8s.objects.names import NODE_GROUP_ANNOTATION
from services.common.errors import DeviceError

# A call ends within the time in which the deploy Job looks after its stage again.
CONNECT_SECONDS = 3
READ_SECONDS = 8
ATTEMPTS = 2  # botocore makes so many for one call
NODE_GROUP_LABEL = "eks.amazonaws.com/nodegroup"
"""The label with which EKS marks a Kubernetes node with its managed node group."""
BUSY = ("ResourceInUseException", "TooManyRequestsException")  # EKS makes one update of a group at a time
DENIED = ("AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "ExpiredTokenException")
USABLE = ("ACTIVE", "UPDATING", "DEGRADED")  # a group that could not start an instance is DEGRADED until it can


class NodeGroupError(DeviceError):
    """EKS refuses or fails a call."""


class EksBusy(NodeGroupError):
    """EKS is updating the node group already, throttles the account, or does not answer: try again later."""

    exit_code = EXIT_AGAIN


class NodeGroupAbsent(NodeGroupError):
    """The node group or its cluster does not exist."""


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
    found = _call("describe_nodegroup", name)["nodegroup"]
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
    _call("update_nodegroup_config", name, scalingConfig={"desiredSize": desired})


def describe_resize(name: str, desired: int) -> str:
    """The command with which a person resizes the node group."""
    cluster, group = split_name(name)
    return (
        f"aws eks update-nodegroup-config --cluster-name {cluster} --nodegroup-name {group} "
        f"--scaling-config desiredSize={desired}"
    )


def split_name(name: str) -> tuple[str, str]:
    """Split CLUSTER/GROUP into cluster and group."""
    cluster, _, group = name.partition("/")
    return cluster, group


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


def _call(method: str, name: str, **arguments: Any) -> Any:
    """Call EKS for the node group CLUSTER/GROUP. Raises `NodeGroupError` that names the call and the group."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError  # noqa: PLC0415

    cluster, group = split_name(name)
    what = f"{method.partition('_')[0]} node group {name}"
    try:
        return getattr(_connect(), method)(clusterName=cluster, nodegroupName=group, **arguments)
    except ClientError as error:
        raise _explain(what, cluster, error.response) from error
    except (NoCredentialsError, NoRegionError) as error:
        raise NodeGroupError(
            f"{what}: this pod has no AWS account or region ({error}). The service accounts deployer and reaper need a "
            f"Pod Identity association (infra/modules/eks makes it), and its agent must run"
        ) from error
    except BotoCoreError as error:
        raise EksBusy(f"{what}: EKS does not answer: {error}") from error


def _explain(what: str, cluster: str, response: dict[str, Any]) -> NodeGroupError:
    code, said = response["Error"]["Code"], response["Error"]["Message"]
    message = f"{what}: {code}: {said.rstrip('.')}"
    if code in BUSY or "Throttl" in code or response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
        return EksBusy(message)
    if code == "ResourceNotFoundException":
        return NodeGroupAbsent(f"{message}. Correct CLUSTER_NAME and the node groups in the overlay's settings.env")
    if code in DENIED:
        return NodeGroupError(
            f"{message}. The roles of the service accounts deployer and reaper must allow eks:DescribeNodegroup and "
            f"eks:UpdateNodegroupConfig on it (infra/modules/eks). If they do, the budget is spent: its action has "
            f"attached {cluster}-{os.environ.get('AWS_REGION', 'REGION')}-over-budget until somebody "
            f"resets it in the console of AWS Budgets"
        )
    return NodeGroupError(message)


@dataclass(frozen=True)
class NodeGroupLease:
    """The Lease of a node group that is scaled up."""

    group: str
    """The EKS cluster and its managed node group, as CLUSTER/GROUP."""
    holder: str
    """A stage, or the name of a one-off's Job."""
    name: str
    """The name of the Lease."""
    uid: str


def read_leases(api: Api) -> list[NodeGroupLease]:
    """The Leases of all node groups that are scaled up."""
    leases = []
    for each in api.find_all("Lease"):
        metadata = each["metadata"]
        if group := (metadata.get("annotations") or {}).get(NODE_GROUP_ANNOTATION):
            leases.append(NodeGroupLease(group, each["spec"]["holderIdentity"], metadata["name"], metadata["uid"]))
    return leases


def find_holder(api: Api, group: str) -> str:
    """The holder of a node group; empty where nobody holds it."""
    return next((lease.holder for lease in read_leases(api) if lease.group == group), "")


def take_lease(api: Api, group: str, holder: str) -> None:
    """Make `holder` the one for which the group is scaled. Raises `Conflict` where somebody else was first."""
    name = f"node-group-{split_name(group)[1].lower().replace('_', '-')}"
    metadata = {"name": name, "annotations": {NODE_GROUP_ANNOTATION: group}}
    spec = {"holderIdentity": holder}
    api.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec})


def count_ready_nodes(api: Api, group: str) -> int:
    """Number of nodes of the group that have joined the Kubernetes cluster and are Ready."""
    nodes = api.find_all("Node", f"{NODE_GROUP_LABEL}={split_name(group)[1]}")
    return sum(has_condition(node, "Ready") for node in nodes)
