"""Checks one capacity reservation against the chosen values and the requested nodes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from infra.apply.inputs import Inputs
from infra.preflight.requirement import Finding
from infra.shapes import Shape
from services.common.errors import RecipeError

# EKS removes the nodes of a Capacity Block this long before the block ends.
BLOCK_ENDS_EARLY = timedelta(minutes=40)
SAME_TIME = timedelta(minutes=1)


def judge_reservation(
    reservation: dict[str, Any], inputs: Inputs, shape: Shape, nodes: int, up: int, now: datetime
) -> tuple[str, list[Finding]]:
    """Checks one capacity reservation against the request for `nodes`, of which `up` already run in it.

    `reservation` is an item of EC2's DescribeCapacityReservations.
    """
    start, end = reservation.get("StartDate"), reservation.get("EndDate")
    is_to_come = bool(start and start > now)
    usable_until = end - BLOCK_ENDS_EARLY if end and inputs.capacity_kind == "capacity_block" else end
    free = reservation["TotalInstanceCount" if is_to_come else "AvailableInstanceCount"]
    seen = f"{inputs.reservation_id}: {free} of {reservation['TotalInstanceCount']} free"
    seen += f", from {_minute(start)}" if is_to_come else ""
    seen += f", until {_minute(usable_until)}" if usable_until else ""
    findings = list(_misfits(reservation, inputs, shape, is_to_come))
    where, show = _where(inputs), _show_reservation(inputs)
    if free + up < nodes:
        got = f"{free} free" + (f", {up} already used by this stack" if up else "")
        findings.append(Finding("the reservation has too few nodes", where, got, f"{nodes} or more", show))
    if usable_until and usable_until <= now:
        got = f"usable until {_minute(usable_until)}"
        findings.append(Finding("the reservation is over", where, got, "later", show))
    return seen, findings


def _misfits(reservation: dict[str, Any], inputs: Inputs, shape: Shape, is_to_come: bool) -> Iterator[Finding]:
    """Findings for values of the reservation that differ from the chosen ones."""
    where, show = _where(inputs), _show_reservation(inputs)
    facts = [
        ("is for another type", reservation["InstanceType"], shape.name, "write its type into trainium.shape"),
        ("is in another zone", reservation["AvailabilityZoneId"], inputs.zone_id, "write its zone into zone_id"),
    ]
    if is_to_come:
        got = f"it begins at {_minute(reservation['StartDate'])}"
        yield Finding("the reservation has not begun", where, got, "a start in the past", "deploy once it has begun")
    else:
        facts.append(("cannot be used now", reservation["State"], "active", show))
    kind = "capacity_block" if reservation.get("ReservationType") == "capacity-block" else "reservation"
    facts.append(("is of another kind", kind, inputs.capacity_kind, f'capacity.kind = "{kind}"'))
    for what, got, expected, command in facts:
        if got != expected:
            yield Finding(f"the reservation {what}", where, got, expected, command)
    end, chosen = reservation.get("EndDate"), _read_time(inputs.capacity_ends_at)
    if not (abs(end - chosen) <= SAME_TIME if end and chosen else end == chosen):
        right = f"{end:%Y-%m-%dT%H:%M:%SZ}" if end else ""
        yield Finding(
            "the reservation ends at another time than capacity.ends_at tells the deploy tool",
            where,
            f"EndDate {right or 'none'}",
            f"capacity.ends_at, {inputs.capacity_ends_at or 'none'}",
            f'capacity.ends_at = "{right}", then make infra-up',
        )


def _where(inputs: Inputs) -> str:
    return f"capacity reservation {inputs.reservation_id}"


def _show_reservation(inputs: Inputs) -> str:
    return f"aws ec2 describe-capacity-reservations --capacity-reservation-ids {inputs.reservation_id}"


def _minute(time: datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC" if time else ""


def _read_time(text: str) -> datetime | None:
    """Reads RFC 3339. Raises `RecipeError` for a text that is no time with a zone, which terraform refuses as well."""
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise RecipeError(f'capacity.ends_at = "{text}": expected a time such as 2027-01-31T11:30:00Z')
    return time
