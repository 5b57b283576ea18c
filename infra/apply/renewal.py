"""Refuses an apply that would replace the nodes of a pool while something runs on them.

If a node group gets another launch template, machine image or Kubernetes version, EKS replaces its nodes, and meanwhile
raises the group by the maximum number of unavailable nodes (docs.aws.amazon.com/eks, managed-node-update-behavior): a
gang of 16 nodes loses its run, and EKS asks for 16 more nodes, which a Capacity Block does not have. Batch ends the
jobs of a compute environment that gets other nodes or is replaced. AWS provider 5 does not offer EKS' update strategy
MINIMAL, which terminates nodes first. So a pool is replaced only while nothing runs on it.
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

# Arguments that nodes receive when they start.
OF_NODES = {
    "aws_eks_node_group": ("launch_template", "version", "release_version"),
    "aws_batch_compute_environment": ("compute_resources",),
}
# Arguments that EKS and Batch change in place.
IN_PLACE = ("compute_resources.max_vcpus", "compute_resources.min_vcpus", "compute_resources.desired_vcpus")


def list_renewed_pools(plan: Plan) -> list[str]:
    """Addresses of the pools whose nodes the plan would replace."""
    return [change.address for change in plan.changes if _is_renewal(change)]


def judge_renewal(account: Account, inputs: Inputs, renewed: list[str]) -> list[Finding]:
    """Findings for the nodes and jobs that have to end before these pools are replaced; empty if there are none."""
    in_use = list(_nodes_in_use(account, inputs) if inputs.has_cluster else _jobs(account, inputs))
    if not in_use:
        return []
    target = "" if inputs.has_cluster else " TARGET=batch"
    return [
        Finding(
            what="the plan would replace nodes while the stack is in use",
            where=f"{inputs.name}, {account.region}; {', '.join(renewed)}",
            got=use,
            expected="no node of a stage, and no job",
            command=(
                f"make stage-status{target} shows what runs. Wait for it, or stop it: make stop-stage "
                f"STAGE=...{target} lets a trainer commit a checkpoint, from which the next deployment resumes. Then "
                f"run the same command again"
            ),
        )
        for use in in_use
    ]


def _is_renewal(change: Change) -> bool:
    """Whether the change replaces nodes; a new pool has none."""
    kept = OF_NODES.get(type_of(change.address))
    if kept is None or change.actions == ("create",):
        return False
    changed = [path for path in change.changed if path not in IN_PLACE]
    return change.is_loss or any(f"{path}.".startswith(f"{name}.") for path in changed for name in kept)


def _nodes_in_use(account: Account, inputs: Inputs) -> Iterator[str]:
    """Describes the stages' nodes in the stack's groups. Core nodes are always up, and EKS replaces them one by one."""
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
