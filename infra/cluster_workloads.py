"""What runs on the EKS stack, stopped in the order in which nothing that it made in the account is orphaned."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from infra import kubernetes_cluster
from infra.account import Account, explaining_refusals
from infra.addons.releases import read_releases, remove_releases
from infra.leftovers import list_cluster_volumes, list_load_balancers, list_pool_instances
from infra.node_groups import CORE, NodeGroup, list_node_groups
from infra.settings import forget_settings
from infra.waiting import wait_until_none
from services.common.errors import MillraceError
from services.common.recipe import STAGES

NAMESPACE = "millrace"  # of the stages; the contract test holds it to the stack's
NODES_SECONDS = 1800.0  # a node group answers to its new size within minutes, a Trainium node takes some more to end
OBJECTS_SECONDS = 900.0


@dataclass(frozen=True)
class ClusterWorkloads:
    """Deployments, their nodes, and what controllers made."""

    account: Account
    cluster: str
    settings: Path
    """Of the overlay, which names what terraform made."""

    @property
    def place(self) -> str:
        return f"cluster {self.cluster}"

    def is_there(self) -> bool:
        return kubernetes_cluster.find_endpoint(self.account, self.cluster) is not None

    def stop(self) -> None:
        """Raises `DeploymentStays`; `DeviceError` for another cluster; `TryAgain` where something stays too long."""
        with explaining_refusals("infra-down"):
            endpoint = kubernetes_cluster.find_endpoint(self.account, self.cluster) or ""
        kubernetes_cluster.require_context(self.account, self.cluster, endpoint)
        self._stop_deployments()
        self._empty_pools()
        self._delete_made_objects()
        self._remove_addons()

    def forget(self) -> None:
        forget_settings(self.settings)

    def _stop_deployments(self) -> None:
        """The trainer commits a checkpoint before its nodes go."""
        if not kubernetes_cluster.has_raycluster(NAMESPACE):
            print("deployments none: there is no RayCluster", flush=True)
            return
        for stage in STAGES:
            self._run("deploy.commands", "stop-stage", STAGE=stage, TARGET="kuberay")
        # By force: nodes that KEEP=1 left do not hinder it, as the pools are emptied next.
        self._run("k8s.client", "cluster-down", OVERLAY=os.environ.get("OVERLAY") or "eks", FORCE="1")

    def _run(self, module: str, command: str, **variables: str) -> None:
        done = subprocess.run([sys.executable, "-m", module, command], env=os.environ | variables, check=False)
        if done.returncode:
            shown = " ".join(f"{name}={value}" for name, value in variables.items())
            raise DeploymentStays(f"make {command} {shown} failed; its words are above", done.returncode)

    def _empty_pools(self) -> None:
        """All managed node groups but the core's to 0: that one holds the drivers that the next steps need."""
        with explaining_refusals("infra-down, node groups"):
            pools = [group for group in list_node_groups(self.account, self.cluster) if group.pool != CORE]
            for group in pools:
                self._empty(group)
            names = [group.name for group in pools]
            wait_until_none(
                "nodes",
                lambda: [each for name in names for each in list_pool_instances(self.account, self.cluster, name)],
                NODES_SECONDS,
                f"aws eks describe-nodegroup --cluster-name {self.cluster} --nodegroup-name ... says what holds them",
            )
        print(f"nodes       0 in {', '.join(names) or 'no pool'}", flush=True)

    def _empty(self, group: NodeGroup) -> None:
        if group.desired_nodes or group.min_nodes:
            print(f"nodes       {group.name}: {group.desired_nodes} -> 0", flush=True)
            # maxSize stays what it was: it may not be 0.
            self.account.client("eks").update_nodegroup_config(
                clusterName=self.cluster, nodegroupName=group.name, scalingConfig={"minSize": 0, "desiredSize": 0}
            )

    def _delete_made_objects(self) -> None:
        """While the controllers run that turn a deleted object into a deleted volume or load balancer."""
        for made in kubernetes_cluster.list_made():
            print(f"deleting    {made}", flush=True)
            kubernetes_cluster.delete(made)
        with explaining_refusals("infra-down, volumes and load balancers"):
            wait_until_none(
                "volumes and load balancers",
                lambda: [
                    *list_load_balancers(self.account, self.cluster),
                    *list_cluster_volumes(self.account, self.cluster),
                ],
                OBJECTS_SECONDS,
                "a claim stays while a pod uses it: kubectl get persistentvolumeclaims,services -A shows which",
            )
        print("volumes     none of a claim, and no load balancer of a Service", flush=True)

    def _remove_addons(self) -> None:
        if shutil.which("helm"):
            remove_releases(read_releases())
        else:
            print("add-ons     no helm here: they end with the cluster, none of them makes anything outside of it")


class DeploymentStays(MillraceError):
    """The deploy tool could not stop a stage; nothing below it was touched."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
