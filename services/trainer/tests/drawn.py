"""Reads the data of the charts back from a page."""

from __future__ import annotations

import json
import re
from typing import Any


def read_charts(page: str) -> dict[str, Any]:
    """Return the `runs`, `marks` and `charts` of a page's element `millrace-charts`."""
    found = re.search(r'<script type="application/json" id="millrace-charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def read_curves(page: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return the points of each curve by its chart and its name."""
    return {
        (name, curve["name"]): list(zip(curve["steps"], curve["values"], strict=True))
        for name, each in read_charts(page)["charts"].items()
        for curve in each["curves"]
    }
