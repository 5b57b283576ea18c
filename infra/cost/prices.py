"""List prices of everything except nodes, from `prices.json`. Prices differ by region and change."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PRICES_JSON = Path(__file__).parent / "prices.json"
HOURS_OF_A_MONTH = 730


@dataclass(frozen=True)
class ListPrice:
    """A list price. Its name in the table ends with its unit: `hour`, `month`, `gb` or `gb_month`."""

    dollars: float
    dated: str
    source: str
    region: str


@cache
def read_prices() -> dict[str, ListPrice]:
    """All prices by name, which are of one region."""
    table = json.loads(PRICES_JSON.read_text(encoding="utf-8"))
    return {name: ListPrice(region=table["region"], **entry) for name, entry in table["prices"].items()}


def dollars(name: str) -> float:
    return read_prices()[name].dollars


def fsx_gb_month(throughput: int) -> str:
    """Name of the price of a PERSISTENT_2 file system with that many MB/s per TiB."""
    return f"fsx_{throughput}_gb_month"
