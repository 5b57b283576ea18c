"""Stops what runs on the EKS stack, in an order that leaves no orphans in the account."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.account.cluster_resources import CORE, list_load_balancers, list_node_groups
from infra.account.session import Account
from infra.addons.releases import list_installed, read_releases, remove_releases
from infra.apply.overlay_settings import forget_settings
from infra.teardown.leftovers import list_claim_volumes, list_pool_instances, wait_until_none
from infra.teardown.neighbours import NAMESPACES, Neighbour, find_on_cluster
from infra.workloads import kubernetes_cluster
from services.common.errors import DeviceError, TryAgain
from services.common.recipe.schema import STAGES

NAMESPACE = "millrace"  # the stages' namespace; a contract test compares it with the stack's
NODES_SECONDS = 1800.0  # a node group changes its size within minutes, and a Trainium node takes longer to terminate
OBJECTS_SECONDS = 900.0


@dataclass(frozen=True)
class ClusterWorkloads:
    """Deployments, their nodes, and the resources that controllers made for them."""

    account: Account
    cluster: str
    settings: Path
    """The overlay's settings.env, with the ids of the resources that terraform made."""

    @property
    def place(self) -> str:
        return f"cluster {self.cluster}"

    def is_there(self) -> bool:
        return kubernetes_cluster.find_endpoint(self.account, self.cluster) is not None

    def find_neighbours(self) -> list[Neighbour]:
        """Lists resources of others on the cluster, unless that is gone."""
        if not self.is_there():
            return []
        kubernetes_cluster.require_context(self.account, self.cluster)
        return list(find_on_cluster())

    def stop(self) -> None:
        """Stops deployments, empties node groups, removes add-ons, and deletes Services and claims.

        Raises `DeviceError` if a stage cannot be stopped or kubectl talks to another cluster, and `TryAgain` if
        something has not stopped or is not gone in time.
        """
        kubernetes_cluster.require_context(self.account, self.cluster)
        self._stop_deployments()
        self._empty_pools()
        # First, because a claim stays while a pod of an add-on uses it.
        remove_releases(read_releases(), list_installed())
        self._delete_cloud_objects()

    def forget(self) -> None:
        forget_settings(self.settings)

    def _stop_deployments(self) -> None:
        """Stops the stages, so that the trainer commits a checkpoint before its nodes are removed."""
        kinds = kubernetes_cluster.run_kubectl(["api-resources", "--api-group=ray.io", "--output=name"])
        spaces = {each["metadata"]["name"] for each in kubernetes_cluster.list_objects("namespaces")}
        if "rayclusters.ray.io" not in kinds or NAMESPACE not in spaces:
            print(f"deployments none: there is no namespace {NAMESPACE}, or no KubeRay", flush=True)
            return
        clusters = kubernetes_cluster.list_objects("rayclusters.ray.io")
        if any(each["metadata"]["namespace"] == NAMESPACE for each in clusters):
            for stage in STAGES:
                self._run("deploy.commands", "stop-stage", STAGE=stage, TARGET="kuberay")
        # With FORCE, because nodes that KEEP=1 left do not matter: the next step empties the pools.
        self._run("k8s.client", "cluster-down", OVERLAY=os.environ.get("OVERLAY") or "eks", FORCE="1")

    def _run(self, module: str, command: str, **variables: str) -> None:
        done = subprocess.run([sys.executable, "-m", module, command], env=os.environ | variables, check=False)
        if done.returncode:
            shown = " ".join(f"{name}={value}" for name, value in variables.items())
            error = TryAgain if done.returncode == TryAgain.exit_code else DeviceError
            ended = f"make {command} {shown} ended with {done.returncode}; its output is above"
            raise error(f"{ended}. The same make infra-down continues from there")

    def _empty_pools(self) -> None:
        """Scales the stack's node groups to 0, except the core group, whose drivers the next steps need."""
        groups = list_node_groups(self.account, self.cluster)
        emptied = [each for each in groups if each.stack == self.cluster and each.pool != CORE]
        for group in emptied:
            if group.desired_nodes or group.min_nodes:
                print(f"nodes       {group.name}: {group.desired_nodes} -> 0", flush=True)
                # maxSize stays, because EKS does not accept 0.
                size, eks = {"minSize": 0, "desiredSize": 0}, self.account.client("eks")
                eks.update_nodegroup_config(clusterName=self.cluster, nodegroupName=group.name, scalingConfig=size)
        wait_until_none(
            "nodes",
            lambda: [each for group in emptied for each in list_pool_instances(self.account, self.cluster, group.name)],
            NODES_SECONDS,
            f"aws eks describe-nodegroup --cluster-name {self.cluster} --nodegroup-name ... shows why they stay",
        )
        print(f"nodes       0 in {', '.join(each.name for each in emptied) or 'no pool'}", flush=True)

    def _delete_cloud_objects(self) -> None:
        """Deletes Services and claims while the controllers run that delete their load balancers and volumes."""
        for each in kubernetes_cluster.list_cloud_objects():
            print(f"deleting    {each}", flush=True)
            options = ["--ignore-not-found", "--wait=false"]  # a claim stays until its pods are gone
            kubernetes_cluster.run_kubectl(["--namespace", each.namespace, "delete", each.kind, each.name, *options])
        wait_until_none(
            "volumes and load balancers",
            lambda: list(self._list_made()),
            OBJECTS_SECONDS,
            "A claim stays while a pod uses it: kubectl get persistentvolumeclaims,services -A lists them",
        )
        print("volumes     0 volumes of claims and load balancers of Services that Millrace made", flush=True)

    def _list_made(self) -> Iterator[str]:
        """Load balancers and volumes that controllers made for Services and claims in Millrace's own namespaces."""
        own = {*NAMESPACES, *(release.namespace for release in read_releases())}
        made = list_load_balancers(self.account, self.cluster)
        made |= {volume["VolumeId"]: claim for volume, claim in list_claim_volumes(self.account, self.cluster)}
        for name, origin in made.items():
            if origin.partition("/")[0] in own:
                yield name
