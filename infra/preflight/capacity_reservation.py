"""Checks one capacity reservation against the chosen values and the requested nodes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from infra.apply.inputs import Inputs
from infra.preflight.requirement import CheckResult, Finding

# EKS removes the nodes of a Capacity Block this long before the block ends.
BLOCK_ENDS_EARLY = timedelta(minutes=40)
SAME_TIME = timedelta(minutes=1)


def judge_reservation(reservation: dict[str, Any], inputs: Inputs, nodes: int, up: int, now: datetime) -> CheckResult:
    """Checks one capacity reservation against the request for `nodes`, of which `up` already run in it.

    `reservation` is an item of EC2's DescribeCapacityReservations.
    """
    start, end, total = reservation.get("StartDate"), reservation.get("EndDate"), reservation["TotalInstanceCount"]
    is_to_come = bool(start and start > now)
    usable_until = end - BLOCK_ENDS_EARLY if end and inputs.capacity_kind == "capacity_block" else end
    free = total if is_to_come else reservation["AvailableInstanceCount"]
    seen = f"{inputs.reservation_id}: {free} of {total} free"
    seen += f", from {_minute(start)}" if is_to_come else ""
    seen += f", until {_minute(usable_until)}" if usable_until else ""
    where = f"capacity reservation {inputs.reservation_id}"
    show = f"aws ec2 describe-capacity-reservations --capacity-reservation-ids {inputs.reservation_id}"
    problems = [*_misfits(reservation, inputs, is_to_come)]
    if free + up < nodes:
        got = f"{free} free" + (f", {up} already used by this stack" if up else "")
        problems.append(("has too few nodes", got, f"{nodes} or more", show))
    if usable_until and usable_until <= now:
        problems.append(("is over", f"usable until {_minute(usable_until)}", "later", show))
    return seen, [Finding(f"the reservation {what}", where, *rest) for what, *rest in problems]


def _misfits(reservation: dict[str, Any], inputs: Inputs, is_to_come: bool) -> Iterator[tuple[str, str, str, str]]:
    """Values of the reservation that differ from the chosen ones: what, got, expected and the next command."""
    kind = "capacity_block" if reservation.get("ReservationType") == "capacity-block" else "reservation"
    facts = [
        (
            "is for another type",
            reservation["InstanceType"],
            inputs.trainium_shape,
            "write its type into trainium.shape",
        ),
        ("is in another zone", reservation["AvailabilityZoneId"], inputs.zone_id, "change zone_id"),
        ("is of another kind", kind, inputs.capacity_kind, f'capacity.kind = "{kind}"'),
    ]
    if is_to_come:
        got = f"it begins at {_minute(reservation['StartDate'])}"
        yield "has not begun", got, "a start in the past", "deploy once it has begun"
    else:
        facts.append(("cannot be used now", reservation["State"], "active", "choose an active one"))
    yield from (fact for fact in facts if fact[1] != fact[2])
    end = reservation.get("EndDate")
    chosen = datetime.fromisoformat(inputs.capacity_ends_at) if inputs.capacity_ends_at else None
    if not (abs(end - chosen) <= SAME_TIME if end and chosen else end == chosen):
        right = f"{end:%Y-%m-%dT%H:%M:%SZ}" if end else ""
        yield (
            "ends at another time than capacity.ends_at tells the deploy tool",
            f"EndDate {right or 'none'}",
            f"capacity.ends_at, {inputs.capacity_ends_at or 'none'}",
            f'capacity.ends_at = "{right}", then make infra-up',
        )


def _minute(time: datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC" if time else ""
