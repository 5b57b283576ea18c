"""Checks the end of the capacity reservation that a stage's nodes come from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from services.common.errors import DeviceError

RESERVATION_MARGIN = timedelta(minutes=40)
"""Time before the end of a Capacity Block at which EKS removes its nodes. EC2 ends them 30 minutes before."""
IN_THE_OVERLAY = "the overlay's settings.env (CAPACITY_ENDS_AT), then: make cluster-up"


def explain_end(ends_at: str, where: str = IN_THE_OVERLAY) -> str:
    """The reason why the reservation has no nodes any more; empty while it has, and for a reservation without an end.

    `where` names the file that sets the end. Raises `DeviceError` for an end that is not a time.
    """
    if not ends_at:
        return ""
    nodes_go_at = read_end(ends_at, where) - RESERVATION_MARGIN
    if datetime.now(UTC) < nodes_go_at:
        return ""
    return (
        f"the reservation ends at {ends_at}, and AWS removes its nodes from {nodes_go_at:%Y-%m-%dT%H:%MZ} on. For "
        f"another reservation, set `capacity` of the infrastructure, and its end in {where}"
    )


def read_end(text: str, where: str = IN_THE_OVERLAY) -> datetime:
    """The time of a text. Raises `DeviceError` for one that is not an RFC 3339 time with a zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise DeviceError(
            f"the end of the reservation is {text!r}, expected a time such as 2026-12-24T18:30:00Z: {where}"
        )
    return moment.astimezone(UTC)
