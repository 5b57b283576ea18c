"""Writes durations for people."""

from __future__ import annotations

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def write_duration(seconds: float) -> str:
    """Write a duration in its two largest units, such as 3 d 4 h, 12 min 5 s or 0.35 s."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds else "0 s"
    rest = round(seconds)
    number, (size, unit) = next((number, each) for number, each in enumerate(_UNITS) if rest >= each[0])
    whole, left = divmod(rest, size)
    if not left:
        return f"{whole} {unit}"
    smaller_size, smaller_unit = _UNITS[number + 1]
    return f"{whole} {unit} {left // smaller_size} {smaller_unit}"
