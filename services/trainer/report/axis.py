"""Places numbers on the axes of a chart and writes them: linear and logarithmic scales, their ticks, and units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

_MAX_TICKS = 200
"""Ticks that are tried at most, so that no range makes a loop without an end."""


Write = Callable[[float, float | None], str]
"""Writes a value; the second argument is the distance to the next tick, which decides the decimals."""

_SMALLEST = 1e-250
"""Differences below this one count as 0: a share of them is no normal number."""


class Tick(NamedTuple):
    """A labelled place of an axis."""

    place: float
    """Distance from the axis's begin as a share of its length."""
    text: str


class Scale(NamedTuple):
    """Maps values from `low` to `high` to shares of an axis's length, from 0 to 1."""

    low: float
    high: float
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value; values outside of the scale get the nearer end."""
        if self.is_logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))


def fit_scale(values: Sequence[float], *, is_logarithmic: bool = False, begins_at_zero: bool = False) -> Scale:
    """Return a scale that holds all values, and ends at ticks if it is linear.

    A logarithmic scale leaves out values that are not above _SMALLEST.
    """
    known = [value for value in values if math.isfinite(value) and (value > _SMALLEST or not is_logarithmic)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if is_logarithmic:
        return Scale(low / 1.25, high * 1.25, is_logarithmic=True) if high < low * 1.5 else Scale(low, high, True)
    if begins_at_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(_SMALLEST, 1e-9 * max(abs(low), abs(high))):
        margin = abs(high) / 10 if abs(high) > _SMALLEST else 1.0
        low, high = (0.0 if begins_at_zero and low >= 0 else low - margin), high + margin
    step = _nice_step((high - low) / 6)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def find_ticks(scale: Scale, wanted: int, write: Write) -> list[Tick]:
    """Return about as many ticks as wanted at round values of the scale, lowest first, and no text twice."""
    values = _logarithmic_values(scale, wanted) if scale.is_logarithmic else _linear_values(scale, wanted)
    step = min((later - value for value, later in pairwise(values)), default=None)
    texts = {write(value, None if scale.is_logarithmic else step): scale.place(value) for value in reversed(values)}
    return [Tick(place, text) for text, place in reversed(texts.items())]


def _linear_values(scale: Scale, wanted: int) -> list[float]:
    if not scale.high - scale.low > 1e-12 * abs(scale.high):
        return [scale.low]
    step = _nice_step((scale.high - scale.low) / wanted)
    first = math.ceil(scale.low / step - 1e-6)
    count = min(_MAX_TICKS, math.floor(scale.high / step + 1e-6) - first + 1)
    return [(first + number) * step for number in range(count)]


def _logarithmic_values(scale: Scale, wanted: int) -> list[float]:
    if scale.high < 4 * scale.low:
        return [value for value in _linear_values(scale, wanted) if value > 0]
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        powers = range(first, last + 1)
        values = [factor * 10.0**power for power in powers for factor in factors]
        within = [value for value in values if scale.low * (1 - 1e-9) <= value <= scale.high * (1 + 1e-9)]
        if len(within) <= wanted + 1:
            return within
    return within[:: -(-len(within) // wanted)]


def _nice_step(rough: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def write_number(value: float, step: float | None = None) -> str:
    """Write a number in few characters: 1.5M, 20k, 0.25, 4e-4.

    `step` is the distance to the next tick, which decides the decimals; without it there are three significant digits.
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    factor, suffix = next(((size, text) for size, text in _LARGE if abs(value) >= size * (1 - 1e-9)), (1.0, ""))
    if factor == 1e3 and abs(value) < 10_000 and (step is None or step % 1e3):
        factor, suffix = 1.0, ""  # 1,500 rather than 1.5k
    if abs(value) < 1e-3 and (step is None or step < 1e-3):
        digits = 2 if step is None else max(0, math.ceil(math.log10(abs(value) / step) - 1e-6))
        mantissa, _, exponent = f"{value:.{min(digits, 3)}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    shown = value / factor
    if step is None:
        digits = max(0, 2 - math.floor(math.log10(abs(shown)))) if abs(shown) < 100 else 0
        text = f"{shown:,.{digits}f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + suffix
    digits = min(9, max(0, -math.floor(math.log10(step / factor) + 1e-9)))
    text = f"{shown:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if suffix and "." in text else text) + suffix


def write_share(value: float, step: float | None = None) -> str:
    """Write a share in percent."""
    shown = 100 * value
    if step is not None:
        digits = min(9, max(0, -math.floor(math.log10(100 * step) + 1e-9)))
    else:
        digits = 0 if abs(shown) >= 100 else 1 if abs(shown) >= 1 or shown == 0 else 2
    return f"{shown:.{digits}f}%"


def write_bytes(value: float, step: float | None = None) -> str:
    """Write a number of bytes in decimal units."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
