"""Checks whether a node pool fits a stage, before it is scaled up. EKS has no call that tells whether it may be."""

from __future__ import annotations

from deploy.stage_contract import size_variable
from k8s.objects.capacity import check_fit
from k8s.objects.names import EFA, INSTANCE_TYPE_LABEL, NEURON, SHAPE_LABEL
from k8s.objects.node_group import USABLE, EksNodeGroup
from k8s.objects.worker_group import WorkerGroup


def check_pool(group: WorkerGroup, nodes: int, pool: EksNodeGroup) -> str:
    """The reasons why the pool cannot give a stage so many nodes; empty where it can."""
    if pool.status not in USABLE:
        return f"node group {pool.name} is {pool.status}, not ACTIVE: {'; '.join(pool.issues) or 'EKS gives no reason'}"
    checks = [_check_size(group, nodes, pool), _check_subnets(group, pool), _check_fit(group, pool)]
    return "; ".join(filter(None, checks))


def _check_size(group: WorkerGroup, nodes: int, pool: EksNodeGroup) -> str:
    if nodes <= pool.max_size:
        return ""
    return (
        f"{size_variable(group.name)}={nodes} exceeds the limit of node group {pool.name}, {pool.max_size}: use "
        f"fewer, or raise {_variable_of(group)}.max_nodes of the infrastructure (make infra-up)"
    )


def _variable_of(group: WorkerGroup) -> str:
    return "trainium" if NEURON in group.requests else "cpu_nodes"


def _check_subnets(group: WorkerGroup, pool: EksNodeGroup) -> str:
    """The reason why a gang with EFA, which does not leave a subnet, cannot use the pool's; empty where it can."""
    if EFA not in group.requests or len(pool.subnets) <= 1:
        return ""
    return (
        f"node group {pool.name} has the {len(pool.subnets)} subnets {', '.join(pool.subnets)}, so a gang of "
        f"{group.name} pods could straddle zones, and EFA does not leave a subnet (expected: one subnet)"
    )


def _check_fit(group: WorkerGroup, pool: EksNodeGroup) -> str:
    """The reason why the stage's pods do not fit on the pool's nodes; empty where they do.

    EKS reports no instance type where a launch template sets it, as ours does; a label of the node group has it then.
    Pods are as large as a node of their instance type.
    """
    labelled = pool.labels.get(SHAPE_LABEL, "")
    types = pool.instance_types or tuple(filter(None, [labelled]))
    others = [each for each in types if group.instance_type and each != group.instance_type]
    if others:
        return (
            f"node group {pool.name} has nodes of type {', '.join(others)}, but {group.name} pods are sized for "
            f"{group.instance_type}: set {_variable_of(group)}.shape of the infrastructure and _SHAPE in the overlay's "
            f"settings.env to one type (make infra-up writes both), then: make cluster-up"
        )
    labels = pool.labels | {INSTANCE_TYPE_LABEL: group.instance_type}
    return check_fit(pool.name, labels, pool.taints, group)
