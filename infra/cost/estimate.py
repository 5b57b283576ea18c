"""Estimates what a stack costs: per hour while it is up, more while a deployment has nodes, and in total for a run.

List prices of everything except nodes are in `prices.json`. Prices differ by region and change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from infra.apply.inputs import ENDPOINTS, Inputs
from infra.aws_releases import read_support_ends
from infra.shapes import find_shape
from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB, LustreSize
from services.common.process.shutdown import CHECKPOINTS_PER_GRACE_PERIOD, TRAINER_GRACE_SECONDS
from services.common.recipe.derived import estimate_step, round_hours
from services.common.recipe.memory_estimate import checkpoint_bytes
from services.common.recipe.schema import Recipe

PRICES_JSON = Path(__file__).parent / "prices.json"
HOURS_OF_A_MONTH = 730
FSX_THROUGHPUTS = (125, 250, 500, 1000)


@dataclass(frozen=True)
class ListPrice:
    """A list price. Its name in the table ends with its unit: `hour`, `month`, `gb` or `gb_month`."""

    dollars: float
    dated: str
    source: str
    region: str


@cache
def read_prices() -> dict[str, ListPrice]:
    """All prices by name, which are of one region."""
    table = json.loads(PRICES_JSON.read_text(encoding="utf-8"))
    return {name: ListPrice(region=table["region"], **entry) for name, entry in table["prices"].items()}


def dollars(name: str) -> float:
    return read_prices()[name].dollars


def fsx_gb_month(throughput: int) -> str:
    """Name of the price of a PERSISTENT_2 file system with that many MB/s per TiB."""
    return f"fsx_{throughput}_gb_month"


@dataclass(frozen=True)
class Line:
    """A line of the bill."""

    what: str
    count: float
    price: ListPrice | None
    """Price of an hour; None if no public list has it."""

    @property
    def dollars_per_hour(self) -> float:
        return self.count * self.price.dollars if self.price else 0


def control_plane_price(version: str, support: str, today: date) -> str:
    """Name in `prices.json` of the control plane's price on that day, under the upgrade policy EXTENDED or STANDARD."""
    end = read_support_ends().get(version, date.max)
    return "eks_extended_support_hour" if support == "EXTENDED" and today >= end else "eks_cluster_hour"


def list_standing(inputs: Inputs, today: date) -> list[Line]:
    """Everything that AWS bills from `infra-up` to `infra-down`, used or not."""
    prices, gateways, lines = read_prices(), int(not inputs.subnet_id), []
    if core := inputs.core_nodes:
        control_plane = control_plane_price(inputs.kubernetes_version, inputs.kubernetes_support, today)
        lines += [Line("1 x EKS control plane", 1, prices[control_plane]), _nodes("core", core.shape, core.nodes)]
    for what, count, name in (
        ("NAT gateway", gateways, "nat_gateway_hour"),
        ("NAT gateway's public address", gateways, "public_address_hour"),
        ("interface endpoint", ENDPOINTS * gateways * inputs.enable_interface_endpoints, "interface_endpoint_hour"),
    ):
        lines.append(Line(f"{count} x {what}", count, prices[name]))
    if size := inputs.lustre_size:
        price = prices[fsx_gb_month(size.megabytes_per_second_per_tib)]
        lines.append(Line(f"FSx for Lustre, {size}", size.gib / HOURS_OF_A_MONTH, price))
    if inputs.capacity.kind == "reservation":  # only the account knows its size
        lines.append(_nodes("trainium, reserved", inputs.trainium.shape, inputs.trainium.max_nodes))
    return [line for line in lines if line.count]


def list_running(inputs: Inputs, trainium_nodes: int, cpu_nodes: int) -> list[Line]:
    """Everything that AWS bills in addition while a deployment has nodes, except reserved nodes."""
    lines = [_nodes("cpu", inputs.cpu_nodes.shape, cpu_nodes)]
    if inputs.capacity.kind == "on_demand":
        lines.insert(0, _nodes("trainium", inputs.trainium.shape, trainium_nodes))
    return [line for line in lines if line.count]


def describe_cost(
    inputs: Inputs, trainium_nodes: int, cpu_nodes: int, hours: float | None, recipe: Recipe, today: date
) -> str:
    """Both lists with their sums, the price of a run of `hours`, and how long a checkpoint of the recipe takes.

    By default the run has the recipe's steps, or 24 hours where their time on the stack's nodes is unknown.
    """
    standing, running = list_standing(inputs, today), list_running(inputs, trainium_nodes, cpu_nodes)
    hourly, running_hourly, step = _sum(standing), _sum(running), estimate_step(recipe)
    fits = step is not None and step.device.name == inputs.trainium.shape
    planned = round_hours(step.node_hours / trainium_nodes) if step and fits and trainium_nodes else 24.0
    is_scaled = hours is None and step and fits and trainium_nodes not in (0, step.nodes)
    text = [
        "List prices, for an estimate: prices differ between regions, and commitments cost less.",
        *_describe_gaps(inputs, trainium_nodes, [*standing, *running]),
        *_table("billed while the stack is up, used or not", standing),
        f"  {_money(hourly)}/hour  {_money(hourly * 24)}/day  {_money(hourly * HOURS_OF_A_MONTH)}/month",
    ]
    if running:
        text += [
            *_table("billed in addition while a deployment has its nodes", running),
            f"  {_money(running_hourly)}/hour  {_money(running_hourly * 24)}/day",
        ]
    if step:
        run = f"{step.describe_hours()}; {step.describe_cost()}"
        text.append(f"{recipe.name} on {step.nodes} x {step.device.name}: {run}")
    if not fits and hours is None:
        text.append(
            f"WARNING: no hours of {recipe.name} are known on {inputs.trainium.shape} (trainium.shape): its "
            f"cluster.trainer_instance_type is {step.device.name if step else 'not set'}"
        )
    if trainium_nodes or cpu_nodes:
        taken, scaled = planned if hours is None else hours, f", if it scales to {trainium_nodes} nodes"
        total = f"{_money((hourly + running_hourly) * taken)}, the stack included{scaled if is_scaled else ''}"
        text.append(f"a run of {taken:,.9g} hours: {total}")
    text += _describe_support(inputs, today)
    if size := inputs.lustre_size:
        text.append(describe_checkpoints(size, recipe))
    text.append(
        f"Not included: traffic through the NAT gateway ({_money(dollars('nat_gateway_gb'), 3)}/GB), S3 "
        f"({_money(dollars('bucket_gb_month'), 3)}/GB and month), ECR, logs ({_money(dollars('log_gb'), 3)} a GB "
        f"written, {_money(dollars('log_gb_month'), 3)}/GB and month while it is kept), the nodes' own disks, "
        f"and CloudWatch Container Insights, billed by metric and mostly while nodes are up (idle_alarm = null and "
        f"enable_pod_logs = false turn it off)."
    )
    text.append("Sources of the prices:")
    for line in [*standing, *running]:
        text.append(f"  {line.what}: {line.price.source if line.price else 'none: no public list has the type'}")
    return "\n".join(text)


def describe_checkpoints(size: LustreSize, recipe: Recipe) -> str:
    """Says how long a checkpoint of the recipe takes on this file system, and whether a stop leaves time for it.

    If a stop leaves too little time, names the throughput that would be enough.
    """
    written, rate = checkpoint_bytes(recipe), size.bytes_per_second
    wanted = CHECKPOINTS_PER_GRACE_PERIOD * written / TRAINER_GRACE_SECONDS
    text = (
        f"a checkpoint, {written / GIB:,.0f} GiB of {recipe.name}, takes {written / rate:,.0f} s at the file system's "
        f"{rate / 1e6:,.0f} MB/s; {CHECKPOINTS_PER_GRACE_PERIOD} should fit the {TRAINER_GRACE_SECONDS} s of a grace "
        f"period"
    )
    if rate >= wanted:
        return text
    fast = [each for each in FSX_THROUGHPUTS if LustreSize(size.gib, each).bytes_per_second >= wanted]
    advice = f"No throughput of {size.gib:,} GiB is fast enough; a larger fsx.gib is faster in proportion"
    if fast:
        advice = f"fsx = {{ gib = {size.gib}, throughput = {fast[0]} }} is fast enough"
    return f"WARNING: {text}, or a stop may lose the steps since the previous checkpoint. {advice}"


def require_budget(inputs: Inputs, today: date) -> None:
    """Raises `RecipeError` for a budget below the cost of the idle stack, whose action would stop deployments."""
    standing = _sum(list_standing(inputs, today)) * HOURS_OF_A_MONTH
    monthly_dollars = inputs.budget.monthly_dollars
    if monthly_dollars is not None and monthly_dollars <= standing:
        raise RecipeError(
            f"budget.monthly_dollars = {monthly_dollars:g}, and the idle stack costs about {_money(standing)} a month: "
            f"the budget's action would stop deployments every month. Write more than that, plus the runs and all else "
            f"that the account pays for, or leave monthly_dollars out"
        )


def _describe_support(inputs: Inputs, today: date) -> Iterator[str]:
    """Says when standard support of the Kubernetes version ends, if the date is known, and what EKS does then."""
    end = read_support_ends().get(inputs.kubernetes_version)
    if end is None:
        return
    said = f"Kubernetes {inputs.kubernetes_version}: EKS ends its standard support on {end}"
    if inputs.kubernetes_support == "STANDARD":
        yield f"{said}, and then upgrades the cluster to the next version (kubernetes_support = STANDARD)."
        return
    before, after = dollars("eks_cluster_hour"), dollars("eks_extended_support_hour")
    yield (
        f"{said}. From then on the control plane costs {_money(after)} instead of {_money(before)} an hour, "
        f"{_money((after - before) * HOURS_OF_A_MONTH)} more a month (kubernetes_support = EXTENDED"
        f"{'; included above' if today >= end else ''}). STANDARD upgrades the cluster then, to a version on which the "
        f"stages are not tested."
    )


def _describe_gaps(inputs: Inputs, trainium_nodes: int, lines: list[Line]) -> Iterator[str]:
    """Warns of prices of other regions and of lines without a price, and explains nodes that no line bills by use."""
    others = sorted({line.price.region for line in lines if line.price} - {inputs.region})
    if inputs.region and others:
        yield f"WARNING: the stack is in {inputs.region}, and prices of {', '.join(others)} are shown: look up its own."
    if missing := [line.what for line in lines if line.price is None]:
        yield f"WARNING: no price is known of {', '.join(missing)}, which no sum below has: ask AWS, add it to the sums"
    if inputs.capacity.kind == "capacity_block":
        yield (
            f"{trainium_nodes} x {inputs.trainium.shape} belong to a Capacity Block, which was paid for in "
            f"full when it was bought"
        )
    if inputs.capacity.kind == "reservation":
        yield (
            "An On-Demand Capacity Reservation is billed until it ends or is cancelled, used or not. Its size is taken "
            "to be max_nodes; make infra-preflight shows the real one"
        )


def _nodes(pool: str, shape_name: str, count: int) -> Line:
    found = find_shape(shape_name).price
    price = ListPrice(found.dollars_per_hour, found.dated, found.source, found.region) if found else None
    return Line(f"{count} x {shape_name} ({pool})", count, price)


def _sum(lines: list[Line]) -> float:
    return sum(line.dollars_per_hour for line in lines)


def _table(title: str, lines: list[Line]) -> list[str]:
    width = max((len(line.what) for line in lines), default=0)
    return [
        title,
        *(
            f"  {line.what:{width}}  {_money(line.dollars_per_hour, 3):>10}/hour  {price.region}, {price.dated}"
            if (price := line.price)
            else f"  {line.what:{width}}  {'unknown':>10}"
            for line in lines
        ),
    ]


def _money(amount: float, digits: int = 2) -> str:
    return f"${amount:,.{digits}f}"
