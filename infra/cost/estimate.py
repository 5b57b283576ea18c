"""What the cluster costs: by the hour while it stands, more while a stage runs, and in sum for a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infra.cost.prices import HOURS_OF_A_MONTH, dollars, fsx_gb_month, price_region, read_prices
from infra.shapes import find_shape
from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB
from services.common.hardware.lustre import LustreSize
from services.common.process.termination_notice import (
    CHECKPOINTS_PER_NOTICE,
    TRAINER_NOTICE_SECONDS,
    needed_notice_seconds,
)
from services.common.recipe.memory_estimate import checkpoint_bytes
from services.common.recipe.schema import Recipe

FSX_THROUGHPUTS = (125, 250, 500, 1000)


@dataclass(frozen=True)
class Sizes:
    """What is paid for. The core nodes stand always; the others come with a deployment and go after it."""

    region: str | None
    """None: not chosen yet."""
    trainium_shape: str
    trainium_nodes: int
    capacity_kind: str
    """Of the Trainium nodes: on_demand; reservation, billed while nobody uses it; capacity_block, paid for before."""
    reserved_nodes: int
    """Of a reservation; 0 where there is none."""
    cpu_shape: str
    cpu_nodes: int
    control_planes: int
    """Of EKS; 0 on AWS Batch, which costs nothing itself."""
    core_shape: str
    """Empty where there are no core nodes."""
    core_nodes: int
    nat_gateways: int
    interface_endpoints: int
    fsx: LustreSize | None
    """Size of the file system that the stack makes; None where it makes none."""


@dataclass(frozen=True)
class Line:
    """One thing on the bill."""

    what: str
    dollars_per_hour: float
    region: str
    """Of the price, which in another region is another."""
    dated: str
    source: str


def list_standing(sizes: Sizes) -> list[Line]:
    """What is paid for from `infra-up` to `infra-down`, used or not."""
    lines = [_priced("EKS control plane", sizes.control_planes, "eks_cluster_hour")]
    if sizes.core_nodes:
        lines.append(_nodes("core", sizes.core_shape, sizes.core_nodes))
    lines.append(_priced("NAT gateway", sizes.nat_gateways, "nat_gateway_hour"))
    lines.append(_priced("its public address", sizes.nat_gateways, "public_address_hour"))
    lines.append(_priced("interface endpoint", sizes.interface_endpoints, "interface_endpoint_hour"))
    if sizes.fsx:
        throughput = sizes.fsx.megabytes_per_second_per_tib
        if throughput not in FSX_THROUGHPUTS:
            raise RecipeError(f"FSx has {throughput} MB/s/TiB, and PERSISTENT_2 comes with one of {FSX_THROUGHPUTS}")
        price = read_prices()[fsx_gb_month(throughput)]
        hourly = sizes.fsx.gib * price.dollars / HOURS_OF_A_MONTH
        lines.append(Line(f"FSx for Lustre, {sizes.fsx}", hourly, price_region(), price.dated, price.source))
    if sizes.capacity_kind == "reservation":
        lines.append(_nodes("trainium, reserved", sizes.trainium_shape, sizes.reserved_nodes))
    return [line for line in lines if line.dollars_per_hour]


def list_running(sizes: Sizes) -> list[Line]:
    """What is paid for besides, while a deployment holds its nodes. Reserved ones are paid for without it."""
    lines = [_nodes("cpu", sizes.cpu_shape, sizes.cpu_nodes)]
    if sizes.capacity_kind == "on_demand":
        lines.insert(0, _nodes("trainium", sizes.trainium_shape, sizes.trainium_nodes))
    return [line for line in lines if line.dollars_per_hour]


def describe_cost(sizes: Sizes, hours: float, recipe: Recipe) -> str:
    """Both lists, their sums, a run of so many hours, and what a checkpoint of the recipe takes on the file system."""
    standing, running = list_standing(sizes), list_running(sizes)
    hourly, running_hourly = _sum(standing), _sum(running)
    total = (hourly + running_hourly) * hours
    text = [
        "List prices: a hint, no bill. Regions differ, and commitments cost less.",
        *_other_regions(sizes, [*standing, *running]),
        *_table("while it stands, used or not", standing),
        f"  {_money(hourly)}/hour  {_money(hourly * 24)}/day  {_money(hourly * HOURS_OF_A_MONTH)}/month",
    ]
    if running:
        text += [
            *_table("while a deployment holds its nodes, besides", running),
            f"  {_money(running_hourly)}/hour  {_money(running_hourly * 24)}/day",
        ]
    text += _capacity(sizes)
    if sizes.trainium_nodes or sizes.cpu_nodes:
        text.append(f"a run of {hours:g} hours: {_money(total)}")
    if sizes.fsx:
        text.append(describe_checkpoints(sizes.fsx, recipe))
    text.append(
        f"Not in it: what goes through a NAT gateway ({_money(dollars('nat_gateway_gb'), 3)}/GB), S3 "
        f"({_money(dollars('bucket_gb_month'), 3)}/GB and month), ECR, logs, CloudWatch's Container Insights (by "
        f"metric, most of them while nodes are up; idle_alarm = null leaves it out), the nodes' own disks."
    )
    text += ["Prices are from", *(f"  {line.what}: {line.source}" for line in [*standing, *running])]
    return "\n".join(text)


def describe_checkpoints(size: LustreSize, recipe: Recipe) -> str:
    """How long a checkpoint of the recipe takes on a file system of this size, and whether the notice of a stop holds
    as many as it should; where not, the throughput that would do.
    """
    what = f"{checkpoint_bytes(recipe) / GIB:,.0f} GiB of {recipe.name}"
    speed = f"{_write_seconds(size, recipe):,.0f} s at the file system's {size.bytes_per_second / 1e6:,.0f} MB/s"
    if _fits_notice(size, recipe):
        return (
            f"a checkpoint, {what}, takes {speed}; {CHECKPOINTS_PER_NOTICE} of them fit the {TRAINER_NOTICE_SECONDS} s "
            f"between a stop's notice and the end, as they should"
        )
    larger = [replace(size, megabytes_per_second_per_tib=each) for each in FSX_THROUGHPUTS]
    enough = next((each for each in larger if _fits_notice(each, recipe)), None)
    return (
        f"A CHECKPOINT, {what}, TAKES {speed}, and the {TRAINER_NOTICE_SECONDS} s between a stop's notice and the end "
        f"should hold {CHECKPOINTS_PER_NOTICE}: a stop may lose the steps since the checkpoint before. "
        + (
            f"Enough is fsx = {{ gib = {enough.gib}, throughput = {enough.megabytes_per_second_per_tib} }}"
            if enough
            else f"No throughput of {size.gib:,} GiB is enough: more GiB are faster in proportion (fsx.gib)"
        )
    )


def _fits_notice(size: LustreSize, recipe: Recipe) -> bool:
    return needed_notice_seconds(_write_seconds(size, recipe)) <= TRAINER_NOTICE_SECONDS


def _write_seconds(size: LustreSize, recipe: Recipe) -> float:
    return checkpoint_bytes(recipe) / size.bytes_per_second


def require_budget(sizes: Sizes, monthly_dollars: float | None) -> None:
    """Raises `RecipeError` for a budget that is spent with nothing running: its action would stop deployments."""
    standing = _sum(list_standing(sizes)) * HOURS_OF_A_MONTH
    if monthly_dollars is not None and monthly_dollars <= standing:
        raise RecipeError(
            f"budget.monthly_dollars = {monthly_dollars:g}, and the stack costs about {_money(standing)} a month while "
            f"it stands, with nothing running: the budget's action would stop deployments every month. Write more than "
            f"that and what runs cost, and what else the account pays for, or leave monthly_dollars out"
        )


def _other_regions(sizes: Sizes, lines: list[Line]) -> list[str]:
    if sizes.region is None:
        return []
    others = sorted({line.region for line in lines} - {sizes.region})
    if not others:
        return []
    return [f"THE STACK IS IN {sizes.region}, and prices of {', '.join(others)} are not its own: look them up."]


def _capacity(sizes: Sizes) -> list[str]:
    """What is said of nodes that no line by the hour of use has."""
    match sizes.capacity_kind:
        case "capacity_block":
            return [
                f"{sizes.trainium_nodes} x {sizes.trainium_shape} are a Capacity Block's: paid in full when it was "
                f"bought, and not by the hour again"
            ]
        case "reservation":
            return [
                "An On-Demand Capacity Reservation is billed until it ends or is cancelled, whether nodes run in it or "
                "not; counted here is max_nodes, and make infra-preflight says how many it has"
            ]
    return []


def _priced(what: str, count: int, price: str) -> Line:
    found = read_prices()[price]
    return Line(f"{count} x {what}", count * found.dollars, price_region(), found.dated, found.source)


def _nodes(pool: str, shape_name: str, count: int) -> Line:
    price = find_shape(shape_name).price
    what = f"{count} x {shape_name} ({pool})"
    return Line(what, count * price.dollars_per_hour, price.region, price.dated, price.source)


def _sum(lines: list[Line]) -> float:
    return sum(line.dollars_per_hour for line in lines)


def _table(title: str, lines: list[Line]) -> list[str]:
    width = max((len(line.what) for line in lines), default=0)
    return [
        title,
        *(
            f"  {line.what:{width}}  {_money(line.dollars_per_hour, 3):>10}/hour  {line.region}, {line.dated}"
            for line in lines
        ),
    ]


def _money(amount: float, digits: int = 2) -> str:
    return f"${amount:,.{digits}f}"
