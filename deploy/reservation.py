"""The reservation behind a stage's nodes, which may have an end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from services.common.errors import DeviceError

# EKS takes the nodes of a Capacity Block's group away so long before the block ends, and EC2 30 minutes before.
RESERVATION_MARGIN = timedelta(minutes=40)
IN_THE_OVERLAY = "the overlay's settings.env (CAPACITY_ENDS_AT), then: make cluster-up"


def explain_end(ends_at: str, where: str = IN_THE_OVERLAY) -> str:
    """Why a reservation gives no nodes any more; empty while it does, or where it has no end.

    `where` the end is set. Raises `DeviceError` for what is no time.
    """
    if not ends_at:
        return ""
    nodes_go_at = read_end(ends_at, where) - RESERVATION_MARGIN
    if datetime.now(UTC) < nodes_go_at:
        return ""
    return (
        f"the reservation ends at {ends_at}, and AWS takes its nodes away from {nodes_go_at:%Y-%m-%dT%H:%MZ} on. With "
        f"another one, set `capacity` of the infrastructure and its end in {where}"
    )


def read_end(text: str, where: str = IN_THE_OVERLAY) -> datetime:
    """Raises `DeviceError` for what is no RFC 3339 time with a zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise DeviceError(
            f"the end of the reservation is {text!r} (expected: a time as 2026-12-24T18:30:00Z). Mend it in {where}"
        )
    return moment.astimezone(UTC)
