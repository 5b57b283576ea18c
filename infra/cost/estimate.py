"""Estimates what a stack costs: per hour while it is up, more while a deployment has nodes, and in total for a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date

from infra.cost.prices import HOURS_OF_A_MONTH, dollars, fsx_gb_month, price_region, read_prices
from infra.shapes import find_shape
from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB, LustreSize
from services.common.process.shutdown import (
    CHECKPOINTS_PER_NOTICE,
    TRAINER_NOTICE_SECONDS,
    needed_notice_seconds,
)
from services.common.recipe.memory_estimate import checkpoint_bytes
from services.common.recipe.schema import Recipe

FSX_THROUGHPUTS = (125, 250, 500, 1000)


@dataclass(frozen=True)
class ControlPlane:
    """The EKS control plane, whose price depends on how long EKS has supported its Kubernetes version."""

    kubernetes_version: str
    support: str
    """The upgrade policy after standard support, EXTENDED or STANDARD."""
    standard_support_ends: date | None
    """First day after standard support; None if `aws_releases.json` does not list the version."""

    def price_name(self, today: date) -> str:
        """Name in `prices.json` of the price on that day."""
        return "eks_extended_support_hour" if self._is_extended(today) else "eks_cluster_hour"

    def describe_support(self, today: date) -> str:
        """Says when standard support ends, and what EKS does then; empty if the date is unknown."""
        if self.standard_support_ends is None:
            return ""
        end = f"Kubernetes {self.kubernetes_version}: EKS ends its standard support on {self.standard_support_ends}"
        if self.support == "STANDARD":
            return f"{end}, and then upgrades the cluster to the next version (kubernetes_support = STANDARD)."
        before, after = dollars("eks_cluster_hour"), dollars("eks_extended_support_hour")
        return (
            f"{end}. From then on the control plane costs {_money(after)} instead of {_money(before)} an hour, "
            f"{_money((after - before) * HOURS_OF_A_MONTH)} more a month (kubernetes_support = EXTENDED"
            f"{'; included above' if self._is_extended(today) else ''}). STANDARD upgrades the cluster then, to a "
            f"version on which the stages are not tested."
        )

    def _is_extended(self, today: date) -> bool:
        return (
            self.support == "EXTENDED"
            and self.standard_support_ends is not None
            and today >= (self.standard_support_ends)
        )


@dataclass(frozen=True)
class Sizes:
    """Everything that AWS bills for. Core nodes are always up; a deployment starts and stops the others."""

    region: str | None
    """Region of the stack; None if none is chosen yet."""
    trainium_shape: str
    trainium_nodes: int
    capacity_kind: str
    """Purchase of Trainium nodes: on_demand; reservation, billed even while unused; capacity_block, paid upfront."""
    reserved_nodes: int
    """Number of nodes in the reservation; 0 without one."""
    cpu_shape: str
    cpu_nodes: int
    control_plane: ControlPlane | None
    """The EKS control plane; None on AWS Batch, which costs nothing itself."""
    core_shape: str
    """Empty if there are no core nodes."""
    core_nodes: int
    nat_gateways: int
    interface_endpoints: int
    fsx: LustreSize | None
    """Size of the file system that the stack makes; None if it makes none."""


@dataclass(frozen=True)
class Line:
    """A line of the bill."""

    what: str
    dollars_per_hour: float | None
    """Dollars an hour for all of the line; None if no public list has the price."""
    region: str
    """Region of the price; other regions have other prices. Empty without a price."""
    dated: str
    source: str


def list_standing(sizes: Sizes, today: date) -> list[Line]:
    """Everything that AWS bills from `infra-up` to `infra-down`, used or not.

    Raises `RecipeError` for a throughput that FSx does not sell.
    """
    lines = []
    if sizes.control_plane:
        lines.append(_priced("EKS control plane", 1, sizes.control_plane.price_name(today)))
    if sizes.core_nodes:
        lines.append(_nodes("core", sizes.core_shape, sizes.core_nodes))
    lines.append(_priced("NAT gateway", sizes.nat_gateways, "nat_gateway_hour"))
    lines.append(_priced("NAT gateway's public address", sizes.nat_gateways, "public_address_hour"))
    lines.append(_priced("interface endpoint", sizes.interface_endpoints, "interface_endpoint_hour"))
    if sizes.fsx:
        throughput = sizes.fsx.megabytes_per_second_per_tib
        if throughput not in FSX_THROUGHPUTS:
            raise RecipeError(
                f"fsx.throughput = {throughput}: expected the MB/s per TiB of a PERSISTENT_2 file system, one of "
                f"{', '.join(map(str, FSX_THROUGHPUTS))}"
            )
        price = read_prices()[fsx_gb_month(throughput)]
        hourly = sizes.fsx.gib * price.dollars / HOURS_OF_A_MONTH
        lines.append(Line(f"FSx for Lustre, {sizes.fsx}", hourly, price_region(), price.dated, price.source))
    if sizes.capacity_kind == "reservation":
        lines.append(_nodes("trainium, reserved", sizes.trainium_shape, sizes.reserved_nodes))
    return [line for line in lines if line.dollars_per_hour != 0]


def list_running(sizes: Sizes) -> list[Line]:
    """Everything that AWS bills in addition while a deployment has nodes, except reserved nodes."""
    lines = [_nodes("cpu", sizes.cpu_shape, sizes.cpu_nodes)]
    if sizes.capacity_kind == "on_demand":
        lines.insert(0, _nodes("trainium", sizes.trainium_shape, sizes.trainium_nodes))
    return [line for line in lines if line.dollars_per_hour != 0]


def describe_cost(sizes: Sizes, hours: float, recipe: Recipe, today: date) -> str:
    """Both lists with their sums, the price of a run of `hours`, and how long a checkpoint of the recipe takes."""
    standing, running = list_standing(sizes, today), list_running(sizes)
    hourly, running_hourly = _sum(standing), _sum(running)
    text = [
        "List prices, for an estimate: prices differ between regions, and commitments cost less.",
        *_warn_of_other_regions(sizes, [*standing, *running]),
        *_warn_of_missing_prices([*standing, *running]),
        *_table("billed while the stack is up, used or not", standing),
        f"  {_money(hourly)}/hour  {_money(hourly * 24)}/day  {_money(hourly * HOURS_OF_A_MONTH)}/month",
    ]
    if running:
        text += [
            *_table("billed in addition while a deployment has its nodes", running),
            f"  {_money(running_hourly)}/hour  {_money(running_hourly * 24)}/day",
        ]
    text += _describe_capacity(sizes)
    if sizes.trainium_nodes or sizes.cpu_nodes:
        text.append(f"a run of {hours:g} hours: {_money((hourly + running_hourly) * hours)}")
    if sizes.control_plane and (support := sizes.control_plane.describe_support(today)):
        text.append(support)
    if sizes.fsx:
        text.append(describe_checkpoints(sizes.fsx, recipe))
    text.append(
        f"Not included: traffic through the NAT gateway ({_money(dollars('nat_gateway_gb'), 3)}/GB), S3 "
        f"({_money(dollars('bucket_gb_month'), 3)}/GB and month), ECR, logs ({_money(dollars('log_gb'), 3)} a GB "
        f"written, {_money(dollars('log_gb_month'), 3)}/GB and month while it is kept), the nodes' own disks, "
        f"and CloudWatch Container Insights, billed by metric and mostly while nodes are up (idle_alarm = null and "
        f"enable_pod_logs = false turn it off)."
    )
    text += ["Sources of the prices:", *(f"  {line.what}: {line.source}" for line in [*standing, *running])]
    return "\n".join(text)


def describe_checkpoints(size: LustreSize, recipe: Recipe) -> str:
    """Says how long a checkpoint of the recipe takes on this file system, and whether a stop leaves time for it.

    If a stop leaves too little time, names the throughput that would be enough.
    """
    what = f"{checkpoint_bytes(recipe) / GIB:,.0f} GiB of {recipe.name}"
    speed = f"{_write_seconds(size, recipe):,.0f} s at the file system's {size.bytes_per_second / 1e6:,.0f} MB/s"
    notice = f"the {TRAINER_NOTICE_SECONDS} s between a stop's notice and the kill"
    if _fits_notice(size, recipe):
        return f"a checkpoint, {what}, takes {speed}; {notice} have room for the expected {CHECKPOINTS_PER_NOTICE}"
    larger = [replace(size, megabytes_per_second_per_tib=throughput) for throughput in FSX_THROUGHPUTS]
    enough = next((candidate for candidate in larger if _fits_notice(candidate, recipe)), None)
    advice = (
        f"fsx = {{ gib = {enough.gib}, throughput = {enough.megabytes_per_second_per_tib} }} is fast enough"
        if enough
        else f"No throughput of {size.gib:,} GiB is fast enough; a larger fsx.gib is faster in proportion"
    )
    return (
        f"WARNING: a checkpoint, {what}, takes {speed}, and {notice} should have room for {CHECKPOINTS_PER_NOTICE}: a "
        f"stop may lose the steps since the previous checkpoint. {advice}"
    )


def require_budget(sizes: Sizes, monthly_dollars: float | None, today: date) -> None:
    """Raises `RecipeError` for a budget below the cost of the idle stack, whose action would stop deployments."""
    standing = _sum(list_standing(sizes, today)) * HOURS_OF_A_MONTH
    if monthly_dollars is not None and monthly_dollars <= standing:
        raise RecipeError(
            f"budget.monthly_dollars = {monthly_dollars:g}, and the idle stack costs about {_money(standing)} a month: "
            f"the budget's action would stop deployments every month. Write more than that, plus the runs and all else "
            f"that the account pays for, or leave monthly_dollars out"
        )


def _fits_notice(size: LustreSize, recipe: Recipe) -> bool:
    return needed_notice_seconds(_write_seconds(size, recipe)) <= TRAINER_NOTICE_SECONDS


def _write_seconds(size: LustreSize, recipe: Recipe) -> float:
    return checkpoint_bytes(recipe) / size.bytes_per_second


def _warn_of_other_regions(sizes: Sizes, lines: list[Line]) -> list[str]:
    others = sorted({line.region for line in lines if line.region} - {sizes.region})
    if sizes.region is None or not others:
        return []
    return [f"WARNING: the stack is in {sizes.region}, and prices of {', '.join(others)} are shown: look up its own."]


def _warn_of_missing_prices(lines: list[Line]) -> list[str]:
    missing = [line.what for line in lines if line.dollars_per_hour is None]
    if not missing:
        return []
    return [f"WARNING: no price is known of {', '.join(missing)}, and no sum below has it: ask AWS, add it to the sums"]


def _describe_capacity(sizes: Sizes) -> list[str]:
    """Explains Trainium nodes that no line bills by the hour of use."""
    match sizes.capacity_kind:
        case "capacity_block":
            return [
                f"{sizes.trainium_nodes} x {sizes.trainium_shape} belong to a Capacity Block, which was paid for in "
                f"full when it was bought"
            ]
        case "reservation":
            return [
                "An On-Demand Capacity Reservation is billed until it ends or is cancelled, used or not. Its size is "
                "taken to be max_nodes; make infra-preflight shows the real one"
            ]
    return []


def _priced(what: str, count: int, price: str) -> Line:
    found = read_prices()[price]
    return Line(f"{count} x {what}", count * found.dollars, price_region(), found.dated, found.source)


def _nodes(pool: str, shape_name: str, count: int) -> Line:
    price = find_shape(shape_name).price
    what = f"{count} x {shape_name} ({pool})"
    if price is None:
        return Line(what, None if count else 0, region="", dated="", source="none: no public list has the type")
    return Line(what, count * price.dollars_per_hour, price.region, price.dated, price.source)


def _sum(lines: list[Line]) -> float:
    return sum(line.dollars_per_hour or 0 for line in lines)


def _table(title: str, lines: list[Line]) -> list[str]:
    width = max((len(line.what) for line in lines), default=0)
    return [
        title,
        *(
            f"  {line.what:{width}}  {_money(line.dollars_per_hour, 3):>10}/hour  {line.region}, {line.dated}"
            if line.dollars_per_hour is not None
            else f"  {line.what:{width}}  {'unknown':>10}"
            for line in lines
        ),
    ]


def _money(amount: float, digits: int = 2) -> str:
    return f"${amount:,.{digits}f}"
