"""Pools of nodes that an apply would start anew, and whether something runs on them.

EKS answers to another launch template, machine image or version of Kubernetes by replacing the nodes of a group, and
raises the group meanwhile by as many as may be away at a time (docs.aws.amazon.com/eks, managed-node-update-behavior):
a gang of 16 loses its run, and asks for 16 nodes more, which a Capacity Block does not have. Batch ends the jobs of a
compute environment that gets other nodes, or is replaced. AWS provider 5 has no word for EKS' update strategy MINIMAL,
which would take the nodes first. So a pool is renewed while nothing runs on it, and terraform waits until then.
"""

from __future__ import annotations

from collections.abc import Iterator

from infra.account.batch_queues import list_job_ids, list_queues
from infra.account.managed_node_groups import CORE, list_node_groups
from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.apply.terraform import Change, Plan, type_of
from infra.preflight.requirement import Finding
from infra.teardown.leftovers import list_pool_instances
from infra.workloads.kubernetes_cluster import find_endpoint

# What of a group, or of an environment, its nodes have from their start.
OF_NODES = {
    "aws_eks_node_group": ("launch_template", "version", "release_version"),
    "aws_batch_compute_environment": ("compute_resources",),
}
# What EKS and Batch change in place.
IN_PLACE = ("compute_resources.max_vcpus", "compute_resources.min_vcpus", "compute_resources.desired_vcpus")


def list_renewed_pools(plan: Plan) -> list[str]:
    """Addresses of the pools whose nodes, where there are any, would be ended."""
    return [change.address for change in plan.changes if _is_renewal(change)]


def judge_renewal(account: Account, inputs: Inputs, renewed: list[str]) -> list[Finding]:
    """What has to end before these pools can be renewed; nothing where nothing runs on the stack."""
    in_use = list(_nodes_in_use(account, inputs) if inputs.has_cluster else _jobs(account, inputs))
    if not in_use:
        return []
    target = "" if inputs.has_cluster else " TARGET=batch"
    return [
        Finding(
            what="the plan would start nodes anew while the stack is in use",
            where=f"{inputs.name}, {account.region}; {', '.join(renewed)}",
            got=what,
            expected="no node of a stage, and no job",
            command=(
                f"make stage-status{target} shows what runs; wait for it, or make stop-stage STAGE=...{target} lets it "
                f"commit a checkpoint, from which the next deployment goes on. Then the same command"
            ),
        )
        for what in in_use
    ]


def _is_renewal(change: Change) -> bool:
    """A pool that is only made ends no node."""
    kept = OF_NODES.get(type_of(change.address))
    if kept is None or change.actions == ("create",):
        return False
    changed = [path for path in change.changed if path not in IN_PLACE]
    return change.is_loss or any(f"{path}.".startswith(f"{name}.") for path in changed for name in kept)


def _nodes_in_use(account: Account, inputs: Inputs) -> Iterator[str]:
    """Nodes of stages, in groups of the stack. Those of the core are always there, and take turns while no other is."""
    if find_endpoint(account, inputs.name) is None:
        return
    for group in list_node_groups(account, inputs.name):
        if group.pool == CORE or group.stack != inputs.name:
            continue
        nodes = max(group.desired_nodes, len(list_pool_instances(account, inputs.name, group.name)))
        if nodes:
            yield f"node group {group.name} has {nodes} nodes"


def _jobs(account: Account, inputs: Inputs) -> Iterator[str]:
    for queue in list_queues(account, inputs.name):
        if names := [name for _, name in list_job_ids(account, queue.name)]:
            yield f"job queue {queue.name} has {', '.join(names)}"
