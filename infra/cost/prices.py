"""List prices of what stands beside the nodes, from `prices.json`. Hints: they differ by region and change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PRICES_JSON = Path(__file__).parent / "prices.json"
HOURS_OF_A_MONTH = 730


@dataclass(frozen=True)
class ListPrice:
    """The name of one in the table ends with what it is for: `hour`, `month`, `gb`, `gb_month`."""

    dollars: float
    dated: str
    source: str


@cache
def read_prices() -> dict[str, ListPrice]:
    table = json.loads(PRICES_JSON.read_text(encoding="utf-8"))["prices"]
    return {name: ListPrice(**entry) for name, entry in table.items()}


def price_region() -> str:
    region: str = json.loads(PRICES_JSON.read_text(encoding="utf-8"))["region"]
    return region


def dollars(name: str) -> float:
    return read_prices()[name].dollars


def fsx_gb_month(throughput: int) -> str:
    """The price's name of a PERSISTENT_2 file system with so many MB/s for each TiB."""
    return f"fsx_{throughput}_gb_month"
