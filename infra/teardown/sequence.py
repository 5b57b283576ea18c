"""Takes a stack down in an order that leaves no orphans.

No step keeps a record: each looks for what is left for it to do. So the same command continues a teardown that was
interrupted at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.account.session import Account
from infra.apply.terraform import Stack, type_of, without_indices
from infra.teardown.leftovers import list_unused_interfaces
from infra.teardown.neighbours import describe_neighbours, find_in_account
from infra.workloads.batch_workloads import BatchWorkloads
from infra.workloads.cluster_workloads import ClusterWorkloads
from services.common.errors import DeviceError

STOP_POLICY = "{name}-{region}-over-budget"  # as in modules/guardrails; a test compares them

# KEEP_DATA keeps the modules with data, and those on which the data depends.
KEPT_MODULES = ("module.storage", "module.registry", "module.network", "module.security_groups")
PAID_BY_THE_HOUR = ("aws_nat_gateway", "aws_eip")
INTERFACE_ENDPOINTS = "module.network.aws_vpc_endpoint.interface"
HOLDERS = ("aws_s3_bucket", "aws_ecr_repository")
ALONE = "make cluster-down OVERLAY=eks removes Millrace alone"
Workloads = ClusterWorkloads | BatchWorkloads


@dataclass(frozen=True)
class Teardown:
    """The teardown of one stack."""

    account: Account
    stack: Stack
    name: str
    is_data_kept: bool
    workloads: Workloads

    def check_neighbours(self) -> None:
        """Prints what others have on the cluster and in the network, which stays.

        Raises `DeviceError` if some of it would be destroyed with the cluster, or would stop terraform halfway.
        """
        neighbours = [*self.workloads.find_neighbours(), *find_in_account(self.account, self.name)]
        # With the data the network stays as well.
        if in_the_way := [each for each in neighbours if each.is_on_cluster or not self.is_data_kept]:
            is_of_network = not any(each.is_on_cluster for each in in_the_way)
            way = "make infra-down without KEEP_DATA=false leaves them" if is_of_network else ALONE
            raise DeviceError(
                f"{len(in_the_way)} resources beside {self.name} belong to others, and would be destroyed with it or "
                f"stop its destruction halfway. Nothing was taken down:\n{describe_neighbours(in_the_way)}\n"
                f"{way}. Or their owners remove them, with the commands above"
            )
        if neighbours:
            shown = describe_neighbours(neighbours)
            print(f"{len(neighbours)} resources belong to others, and stay:\n{shown}", flush=True)

    def run(self) -> None:
        """Takes the stack down.

        Raises `TryAgain` if something is not gone in time, and `DeviceError` if a tool or a permission is missing.
        """
        self.stack.init()
        if self.workloads.is_there():
            self._require_state()
            self.workloads.stop()
        else:
            print(f"gone        {self.workloads.place}, with everything that ran there", flush=True)
        self._detach_stop_policy()
        if self.is_data_kept:
            self._destroy_around_data()
        else:
            self._destroy_all()

    def _require_state(self) -> None:
        """Raises `DeviceError` if terraform's state is empty, because all resources would be left and billed."""
        if not self.stack.resources():
            raise DeviceError(
                f"{self.workloads.place} exists, but terraform's state here is empty, so nothing was stopped. By "
                f"default the state is a file in the checkout where make infra-up ran: run this there, or name the "
                f"state's backend in backend_override.tf"
            )

    def _detach_stop_policy(self) -> None:
        """Detaches the policy that the budget's action attached, because IAM deletes no attached policy."""
        iam, policy = self.account.client("iam"), STOP_POLICY.format(name=self.name, region=self.account.region)
        found = self.account.pages("iam", "list_policies", "Policies", Scope="Local")
        for arn in [each["Arn"] for each in found if each["PolicyName"] == policy]:
            for role in list(self.account.pages("iam", "list_entities_for_policy", "PolicyRoles", PolicyArn=arn)):
                print(f"policy      {policy} detached from role {role['RoleName']}", flush=True)
                iam.detach_role_policy(RoleName=role["RoleName"], PolicyArn=arn)

    def _destroy_around_data(self) -> None:
        """Destroys everything except the data and its network, but also the parts of the network billed by the hour."""
        if targets := list_targets_around_data(self.stack.resources()):
            self._persist(lambda: self._destroy_targets(targets))
        print("kept        bucket, file system, registry, their key, and their network")
        print("            make infra-up restores the rest around them; KEEP_DATA=false destroys them", flush=True)

    def _destroy_targets(self, targets: list[str]) -> None:
        plan = self.stack.plan("-destroy", *(f"-target={target}" for target in targets), is_quiet=True)
        if lost := [change.address for change in plan.changes if change.is_loss_of_data]:
            raise DeviceError(
                f"terraform would also destroy {', '.join(lost)}, and data has to stay. Nothing was destroyed. "
                f"KEEP_DATA=false destroys data as well"
            )
        self.stack.apply()

    def _destroy_all(self) -> None:
        # A bucket and a registry with content can be destroyed only after keep_data is off. Only existing ones are
        # targeted, because terraform would make those again that an earlier run destroyed.
        holders = [address for address in self.stack.resources() if type_of(address) in HOLDERS]
        if holders:
            options = ["-var=keep_data=false", *(f"-target={address}" for address in holders)]
            if self.stack.plan(*options, is_quiet=True).changes:
                self.stack.apply()
        self._persist(lambda: self.stack.destroy("-var=keep_data=false"))
        self.workloads.forget()
        print("destroyed   everything that terraform made", flush=True)

    def _persist(self, destroy: Callable[[], None]) -> None:
        """Retries once after deleting the network interfaces that abruptly terminated nodes left in the subnets."""
        try:
            destroy()
        except DeviceError:
            left = list_unused_interfaces(self.account, self.name)
            for name in left:
                print(f"deleting    {name}, which a node left behind", flush=True)
                self.account.client("ec2").delete_network_interface(NetworkInterfaceId=name)
            if not left:
                raise
            destroy()


def list_targets_around_data(addresses: Iterable[str]) -> list[str]:
    """Terraform's targets for a teardown of everything except the data and its network.

    A module of which nothing is kept is one target, because terraform then orders the destruction.
    """
    targets = set()
    for address in addresses:
        module = ".".join(address.split(".")[:2])  # module.network[0] in module.network[0].aws_subnet.nodes
        is_of_kept = without_indices(module) in KEPT_MODULES
        is_paid = type_of(address) in PAID_BY_THE_HOUR or without_indices(address).startswith(INTERFACE_ENDPOINTS)
        if is_paid or not is_of_kept:
            targets.add(address if is_of_kept or not module.startswith("module.") else module)
    return sorted(targets)
