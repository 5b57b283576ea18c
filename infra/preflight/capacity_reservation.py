"""Checks a capacity reservation against the chosen values and the requested nodes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from infra.apply.inputs import Inputs
from infra.preflight.requirement import CheckResult

# EKS removes the nodes of a Capacity Block this long before the block ends.
BLOCK_ENDS_EARLY = timedelta(minutes=40)
SAME_TIME = timedelta(minutes=1)
MINUTE = "%Y-%m-%d %H:%M UTC"


def check_reservation(reservation: dict[str, Any], inputs: Inputs, nodes: int, up: int, now: datetime) -> CheckResult:
    """Checks a reservation against the request for `nodes`, of which `up` already run in it.

    `reservation` is an item of EC2's DescribeCapacityReservations.
    """
    capacity = inputs.capacity
    start, end, total = reservation.get("StartDate"), reservation.get("EndDate"), reservation["TotalInstanceCount"]
    is_block = reservation.get("ReservationType") == "capacity-block"
    is_to_come = bool(start and start > now)
    usable_until = end - BLOCK_ENDS_EARLY if end and is_block else end
    free = total if is_to_come else reservation["AvailableInstanceCount"]
    chosen_end = datetime.fromisoformat(capacity.ends_at) if capacity.ends_at else None
    has_same_end = abs(end - chosen_end) <= SAME_TIME if end and chosen_end else end == chosen_end
    actual_end = f"{end:%Y-%m-%dT%H:%M:%SZ}" if end else ""
    facts = {
        "trainium.shape": (reservation["InstanceType"], inputs.trainium.shape),
        "zone_id": (reservation["AvailabilityZoneId"], inputs.zone_id),
        "capacity.kind": ("capacity_block" if is_block else "reservation", capacity.kind),
        "capacity.ends_at": (capacity.ends_at if has_same_end else actual_end, capacity.ends_at),
    }
    problems = [
        f'{name} is "{chosen}", and the reservation\'s is "{actual}": write {name} = "{actual}", then make infra-up'
        for name, (actual, chosen) in facts.items()
        if actual != chosen
    ]
    if is_to_come or reservation["State"] != "active":
        problems.append(
            f"it is {reservation['State']}{f' until {start:{MINUTE}}' if is_to_come else ''}, expected active"
        )
    if free + up < nodes:
        problems.append(f"it has {free} free nodes, and {up} that this stack uses, expected {nodes} or more")
    if usable_until and usable_until <= now:
        problems.append(f"it was usable until {usable_until:{MINUTE}}")
    seen = f"{capacity.reservation_id}: {free} of {total} free"
    seen += f", from {start:{MINUTE}}" if is_to_come else ""
    seen += f", until {usable_until:{MINUTE}}" if usable_until else ""
    show = f"aws ec2 describe-capacity-reservations --capacity-reservation-ids {capacity.reservation_id} shows it"
    return seen, [f"capacity reservation {capacity.reservation_id}: {each}. {show}" for each in problems]
