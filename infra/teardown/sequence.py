"""Taking everything down, in the order in which nothing is orphaned: each step asks the world what is left for it.

So the same command continues after a cut at any point: no step remembers, and one that finds its work done goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from infra.account.session import Account, explaining_refusals
from infra.apply.terraform import Stack, type_of, without_indices
from infra.teardown.leftovers import list_unused_interfaces
from infra.teardown.neighbours import Neighbour, Place, describe_neighbours
from services.common.errors import DeviceError

STOP_POLICY = "{name}-{region}-over-budget"  # of modules/guardrails, to which a test holds it

# What KEEP_DATA keeps: the data, and what it cannot be without.
KEPT_MODULES = ("module.storage", "module.registry", "module.network", "module.security_groups")
PAID_BY_THE_HOUR = ("aws_nat_gateway", "aws_eip")
INTERFACE_ENDPOINTS = "module.network.aws_vpc_endpoint.interface"
HOLDERS = ("aws_s3_bucket", "aws_ecr_repository")


class Workloads(Protocol):
    """What runs on a stack, and what that made of which terraform knows nothing."""

    @property
    def place(self) -> str:
        """Where it runs, in words: `cluster millrace`."""

    def is_there(self) -> bool:
        """Is there still something for it to run on?"""

    def find_neighbours(self) -> list[Neighbour]:
        """What somebody else has beside it, there or in the stack's network."""

    def stop(self) -> None:
        """End all of it, checkpoints committed. Raises `TryAgain` where something does not go in time."""

    def forget(self) -> None:
        """Remove what was written for it, once everything else is destroyed."""


@dataclass(frozen=True)
class Teardown:
    """What is taken down."""

    account: Account
    stack: Stack
    name: str
    is_data_kept: bool
    is_cluster_kept: bool
    """Does only what Millrace made on the cluster go? Then all that terraform made stays."""
    workloads: Workloads

    def look_around(self) -> None:
        """Print what others have beside the stack, which stays.

        Raises `DeviceError` where something of theirs would end with the cluster, or would stop terraform halfway.
        """
        neighbours = self.workloads.find_neighbours()
        in_the_way = [each for each in neighbours if self._is_in_the_way(each)]
        if in_the_way:
            raise DeviceError(self._describe_refusal(in_the_way))
        if neighbours:
            print(
                f"{len(neighbours)} things are somebody else's, and stay:\n{describe_neighbours(neighbours)}",
                flush=True,
            )

    def run(self) -> None:
        """Raises `TryAgain` where something does not go in time, `DeviceError` where a tool or a right is lacking."""
        if self.is_cluster_kept:
            self.workloads.stop()
            print(f"kept        {self.workloads.place}, its core nodes and network, and the data", flush=True)
            print("            make addons and make cluster-up bring the rest back", flush=True)
            return
        with explaining_refusals("infra-down"):
            is_there = self.workloads.is_there()
        if is_there:
            self._require_state_of_it()
            self.workloads.stop()
        else:
            print(f"gone        {self.workloads.place}, and all that ran there", flush=True)
        self._destroy()

    def _is_in_the_way(self, neighbour: Neighbour) -> bool:
        """The network stays with the data, and what is in it."""
        if self.is_cluster_kept:
            return False
        return neighbour.place is Place.CLUSTER or not self.is_data_kept

    def _describe_refusal(self, in_the_way: list[Neighbour]) -> str:
        lines = [f"{len(in_the_way)} things beside {self.name} are somebody else's. Nothing was taken down:"]
        lines.append(describe_neighbours(in_the_way))
        if any(each.place is Place.CLUSTER for each in in_the_way):
            lines.append(
                f"What is on {self.workloads.place} would end with it, or keep EKS from deleting it. make infra-down "
                f"KEEP_CLUSTER=true takes down what Millrace made on it, and leaves it to them."
            )
        if any(each.place is Place.NETWORK for each in in_the_way):
            lines.append(
                "What is in the network would keep EC2 from deleting it, after the data is gone. Without "
                "KEEP_DATA=false the network stays."
            )
        lines.append("Or whoever owns them moves them; each one's command removes it. Then make infra-down again.")
        return "\n".join(lines)

    def _require_state_of_it(self) -> None:
        """Before anything is stopped: what is not in the state would be left, and paid for."""
        self.stack.init()
        if not self.stack.resources():
            raise DeviceError(
                f"{self.workloads.place} is there, and terraform's state is empty: nothing was stopped. The state is "
                f"local by default, in the checkout in which make infra-up ran; run this there, or name its backend in "
                f"backend_override.tf"
            )

    def _detach_stop_policy(self) -> None:
        """What the budget's action attached, terraform does not know of, and IAM deletes no policy that is attached."""
        iam, policy = self.account.client("iam"), STOP_POLICY.format(name=self.name, region=self.account.region)
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
        targets = list_targets_around_data(self.stack.resources())
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
        self.workloads.forget()
        print("destroyed   everything that terraform made", flush=True)

    def _persist(self, destroy: Callable[[], None]) -> None:
        """Once more after removing what nodes that ended abruptly left in the subnets."""
        try:
            destroy()
        except DeviceError:
            with explaining_refusals("infra-down, unused interfaces"):
                left = list_unused_interfaces(self.account, self.name)
                for name in left:
                    print(f"deleting    {name}, which a node left behind", flush=True)
                    self.account.client("ec2").delete_network_interface(NetworkInterfaceId=name)
            if not left:
                raise
            destroy()


def list_targets_around_data(addresses: Iterable[str]) -> list[str]:
    """What terraform is aimed at, of what its state holds, to destroy everything but the data and what holds it."""
    return sorted({_target_of(address) for address in addresses if not _is_kept(address)})


def _is_kept(address: str) -> bool:
    plain = without_indices(address)
    is_paid = type_of(address) in PAID_BY_THE_HOUR or plain.startswith(INTERFACE_ENDPOINTS)
    return _module_of(plain) in KEPT_MODULES and not is_paid


def _target_of(address: str) -> str:
    """A whole module where nothing of it is kept: terraform then knows its order."""
    module = _module_of(address)
    is_of_kept = without_indices(module) in KEPT_MODULES
    return address if is_of_kept or not module.startswith("module.") else module


def _module_of(address: str) -> str:
    """`module.network[0]` of `module.network[0].aws_subnet.nodes`."""
    return ".".join(address.split(".")[:2])
