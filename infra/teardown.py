"""Taking everything down, in the order in which nothing is orphaned: each step asks the world what is left for it.

So the same command continues after a cut at any point: no step remembers, and one that finds its work done goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra import kubernetes_cluster
from infra.account import Account, explaining_refusals
from infra.addons.releases import read_releases, remove_releases
from infra.leftovers import list_cluster_volumes, list_load_balancers, list_pool_instances, list_unused_interfaces
from infra.node_groups import CORE, NodeGroup, list_node_groups
from infra.settings import forget_settings
from infra.stack import Stack, type_of
from services.common.errors import DeviceError, MillraceError, TryAgain
from services.common.recipe import STAGES

NAMESPACE = "millrace"  # of the stages; the contract test holds it to the stack's
STOP_POLICY = "{name}-{region}-over-budget"  # of modules/guardrails, to which a test holds it
POLL_SECONDS = 10.0
NODES_SECONDS = 1800.0  # a node group answers to its new size within minutes, a Trainium node takes some more to end
OBJECTS_SECONDS = 900.0

# What KEEP_DATA keeps: the data, and what it cannot be without.
KEPT_MODULES = ("module.storage", "module.registry", "module.network")
PAID_BY_THE_HOUR = ("aws_nat_gateway", "aws_eip")
INTERFACE_ENDPOINTS = "module.network.aws_vpc_endpoint.interface"
HOLDERS = ("aws_s3_bucket", "aws_ecr_repository")


@dataclass(frozen=True)
class Teardown:
    """What is taken down, and with what patience."""

    account: Account
    stack: Stack
    cluster: str
    is_data_kept: bool
    settings: Path

    def run(self) -> None:
        """Raises `TryAgain` where something does not go in time, `DeviceError` where a tool or a right is lacking."""
        with explaining_refusals("infra-down"):
            endpoint = kubernetes_cluster.find_endpoint(self.account, self.cluster)
        if endpoint is None:
            print(f"cluster     {self.cluster} is gone, and all that ran on it", flush=True)
        else:
            self._require_state_of_it()
            kubernetes_cluster.require_context(self.account, self.cluster, endpoint)
            self._stop_deployments()
            self._empty_pools()
            self._delete_made_objects()
            self._remove_addons()
        self._destroy()

    def _require_state_of_it(self) -> None:
        """Before anything is stopped: what is not in the state would be left, and paid for."""
        self.stack.init()
        if not self.stack.resources():
            raise DeviceError(
                f"cluster {self.cluster} is there, and terraform's state is empty: nothing was stopped. The state is "
                f"local by default, in the checkout in which make infra-up ran; run this there, or name its backend in "
                f"backend_override.tf"
            )

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
            self._wait_until_none(
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
            self._wait_until_none(
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

    def _detach_stop_policy(self) -> None:
        """What the budget's action attached, terraform does not know of, and IAM deletes no policy that is attached."""
        iam, policy = self.account.client("iam"), STOP_POLICY.format(name=self.cluster, region=self.account.region)
        with explaining_refusals("infra-down, the budget's policy"):
            for each in self.account.pages("iam", "list_policies", "Policies", Scope="Local"):
                if each["PolicyName"] != policy:
                    continue
                arn = each["Arn"]
                found = self.account.pages("iam", "list_entities_for_policy", "PolicyRoles", PolicyArn=arn)
                for role in list(found):
                    print(f"policy      {policy} taken from role {role['RoleName']}", flush=True)
                    iam.detach_role_policy(RoleName=role["RoleName"], PolicyArn=arn)

    def _destroy(self) -> None:
        self._detach_stop_policy()
        self.stack.init()
        if self.is_data_kept:
            self._destroy_around_data()
        else:
            self._destroy_all()

    def _destroy_around_data(self) -> None:
        """Everything but the data and the network that holds it; of that, what is paid for by the hour goes too."""
        targets = sorted({_target_of(address) for address in self.stack.resources() if not _is_kept(address)})
        if targets:
            self._persist(lambda: self._destroy_targets(targets))
        print("kept        bucket, file system, registry, their key, and the network that holds them")
        print("            make infra-up brings the rest back around them; KEEP_DATA=false destroys them", flush=True)

    def _destroy_targets(self, targets: list[str]) -> None:
        plan = self.stack.plan("-destroy", *(f"-target={target}" for target in targets), is_quiet=True)
        lost = [change.address for change in plan.changes if change.is_loss_of_data]
        if lost:
            raise DeviceError(
                f"terraform would destroy {', '.join(lost)} too, and data is to be kept. Nothing was destroyed; "
                f"KEEP_DATA=false destroys data"
            )
        self.stack.apply()

    def _destroy_all(self) -> None:
        # Bucket and registry refuse to go while anything is in them, until they are told otherwise. Aimed at those that
        # are there alone: what an earlier run has destroyed is not made again for it.
        holders = [address for address in self.stack.resources() if type_of(address) in HOLDERS]
        if holders:
            options = ["-var=keep_data=false", *(f"-target={address}" for address in holders)]
            if self.stack.plan(*options, is_quiet=True).changes:
                self.stack.apply()
        self._persist(lambda: self.stack.destroy("-var=keep_data=false"))
        forget_settings(self.settings)
        print("destroyed   everything that terraform made", flush=True)

    def _persist(self, destroy: Callable[[], None]) -> None:
        """Once more after removing what nodes that ended abruptly left in the subnets."""
        try:
            destroy()
        except DeviceError:
            with explaining_refusals("infra-down, unused interfaces"):
                left = list_unused_interfaces(self.account, self.cluster)
                for name in left:
                    print(f"deleting    {name}, which a node left behind", flush=True)
                    self.account.client("ec2").delete_network_interface(NetworkInterfaceId=name)
            if not left:
                raise
            destroy()

    def _wait_until_none(self, what: str, find: Callable[[], list[str]], seconds: float, advice: str) -> None:
        deadline = time.monotonic() + seconds
        said = ""
        while left := find():
            state = f"waiting     for {what} to go: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}"
            if state != said:
                print(state, flush=True)
                said = state
            if time.monotonic() > deadline:
                raise TryAgain(
                    f"{what} are still there after {seconds:.0f} s: {', '.join(left)}. {advice}. The same command "
                    f"continues"
                )
            time.sleep(POLL_SECONDS)


def _is_kept(address: str) -> bool:
    module = ".".join(address.split(".")[:2])
    is_paid = type_of(address) in PAID_BY_THE_HOUR or address.startswith(INTERFACE_ENDPOINTS)
    return module in KEPT_MODULES and not is_paid


def _target_of(address: str) -> str:
    """A whole module where nothing of it is kept: terraform then knows its order."""
    module = ".".join(address.split(".")[:2])
    return address if module in KEPT_MODULES or not module.startswith("module.") else module


class DeploymentStays(MillraceError):
    """The deploy tool could not stop a stage; nothing below it was touched."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
