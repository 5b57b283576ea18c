"""Refuses an apply that would replace the nodes of a pool while something runs on them.

If a node group gets another launch template, machine image or Kubernetes version, EKS replaces its nodes, and meanwhile
raises the group by the maximum number of unavailable nodes (docs.aws.amazon.com/eks, managed-node-update-behavior): a
gang of 16 nodes loses its run, and EKS asks for 16 more nodes, which a Capacity Block does not have. Batch ends the
jobs of a compute environment that gets other nodes or is replaced. AWS provider 5 does not offer EKS' update strategy
MINIMAL, which terminates nodes first. So a pool is replaced only while nothing runs on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra.account.batch_queues import list_job_ids, list_queues
from infra.account.cluster_resources import CORE, list_node_groups
from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.apply.terraform import Plan, type_of

# Arguments that nodes receive when they start.
OF_NODES = {
    "aws_eks_node_group": ("launch_template", "version", "release_version"),
    "aws_batch_compute_environment": ("compute_resources",),
}
IN_PLACE = ("max_vcpus", "min_vcpus", "desired_vcpus")  # of compute_resources; Batch changes them under a job


def list_renewed_pools(plan: Plan) -> list[str]:
    """Addresses of the pools whose nodes the plan would replace; a new pool has none."""
    renewed = []
    for change in plan.changes:
        arguments = OF_NODES.get(type_of(change.address)) if change.before else None
        sides = [[value_for_nodes(side, name) for name in arguments or ()] for side in (change.before, change.after)]
        if arguments and (change.is_loss or sides[0] != sides[1]):
            renewed.append(change.address)
    return renewed


def value_for_nodes(values: Mapping[str, Any], name: str) -> Any:
    """The argument without the parts of its blocks that are changed in place."""
    value = values.get(name)
    if not isinstance(value, list):
        return value
    return [{key: each for key, each in block.items() if key not in IN_PLACE} for block in value]


def check_renewal(account: Account, inputs: Inputs, renewed: list[str]) -> list[str]:
    """Describes the nodes and jobs that have to end before these pools are replaced."""
    target = "" if inputs.has_cluster else " TARGET=batch"
    return [
        f"the plan would replace nodes of {', '.join(renewed)}, and {use}. make stage-status{target} shows what runs. "
        f"Wait for it, or stop it: make stop-stage STAGE=...{target} lets a trainer commit a checkpoint. Then run the "
        f"same command again"
        for use in (_nodes_in_use if inputs.has_cluster else _jobs)(account, inputs.name)
    ]


def _nodes_in_use(account: Account, stack: str) -> Iterator[str]:
    """Describes the stages' nodes in the stack's groups. Core nodes are always up, and EKS replaces them one by one."""
    for group in list_node_groups(account, stack):
        if group.desired_nodes and group.pool != CORE and group.stack == stack:
            yield f"node group {group.name} has {group.desired_nodes} nodes"


def _jobs(account: Account, stack: str) -> Iterator[str]:
    for queue in list_queues(account, stack):
        if names := [name for _, name in list_job_ids(account, queue)]:
            yield f"job queue {queue} has {', '.join(names)}"
