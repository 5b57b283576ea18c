"""Reads the values of curves back from the charts of a page."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

from services.trainer.report.chart import HEIGHT, WIDTH


class DrawnCurve(NamedTuple):
    """A curve of one choice of axes."""

    chart: str
    name: str
    x_axis: str
    y_axes: list[str]
    points: list[tuple[float, float]]
    x_resolution: float
    y_resolution: float
    """Difference of two values that the drawing can tell apart on a linear axis."""


_FIGURE = re.compile(r'<figure class="[^"]*" id="([^"]*)".*?</figure>', re.DOTALL)
_PLOT = re.compile(r'<div class="plot variant ([^"]*)" data-x="([^"]*)" data-y="([^"]*)">(.*?)</svg>', re.DOTALL)
_CURVE = re.compile(r'<path class="curve[^"]*" data-name="([^"]*)" d="([^"]*)"')


def read_curves(page: str) -> list[DrawnCurve]:
    """Return all curves of all charts of a page, with the values that their places stand for."""
    found = []
    for figure in _FIGURE.finditer(page):
        for classes, x_scale, y_scale, lines in _PLOT.findall(figure[0]):
            (x_axis, *y_axes) = (name.partition("-")[2] for name in classes.split())
            x_low, x_high, _ = x_numbers = [float(text) for text in x_scale.split()]
            y_low, y_high, _ = y_numbers = [float(text) for text in y_scale.split()]
            for name, path in _CURVE.findall(lines):
                points = [
                    (_value(x / WIDTH, x_numbers), _value(1 - y / HEIGHT, y_numbers)) for x, y in _read_path(path)
                ]
                resolutions = ((x_high - x_low) / WIDTH, (y_high - y_low) / HEIGHT)
                found.append(DrawnCurve(figure[1], html.unescape(name), x_axis, y_axes, points, *resolutions))
    return found


def _value(place: float, scale: list[float]) -> float:
    low, high, is_logarithmic = scale
    return float(low * (high / low) ** place) if is_logarithmic else low + place * (high - low)


def _read_path(path: str) -> list[tuple[int, int]]:
    x, y, *distances = (int(text) for text in re.findall(r"-?\d+", path))
    places = [(x, y)]
    for across, down in zip(distances[::2], distances[1::2], strict=True):
        places.append((places[-1][0] + across, places[-1][1] + down))
    return places
