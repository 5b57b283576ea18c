"""Lines of `metrics.jsonl`, and records of commands, that tests write."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.trainer.metrics.commands import CommandRecord

BEGAN = 1_790_000_000.0
"""Time to which the seconds of `make_command` are added."""

STEP = {
    "step": 3,
    "loss": 5.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "step_seconds": 0.5,
    "data_seconds": 0.1,
    "skipped_steps": 0,
    "is_first_of_process": False,
    "time": 1.6e9,
    "step_tokens": 128,
    "tokens": 384,
    "tokens_per_second": 256.0,
    "data_share": 0.2,
    "goodput": 0.5,
    "restarts": 0,
}


def make_steps(num_steps: int, every: int = 100) -> Iterator[dict[str, Any]]:
    """Yield the records of a run that was killed and skipped steps, with measurements of health `every` steps."""
    source = random.Random(0)
    for step in range(1, num_steps + 1):
        is_skipped = step % 1_000 == 40
        record = STEP | {
            "step": step,
            "loss": math.nan if is_skipped else 2.0 + 6.4 * step**-0.25 + source.gauss(0, 0.05),
            "gradient_norm": math.inf if is_skipped else 0.6 + 3 / step + abs(source.gauss(0, 0.1)),
            "step_seconds": 0.4 + abs(source.gauss(0, 0.03)),
            "is_first_of_process": step % 700 == 1,
            "time": BEGAN + 0.45 * step,
            "run_started_at": BEGAN,
            "tokens": 2_048 * step,
            "peak_rss_bytes": 7e8 + 1e5 * math.sqrt(step),
            "restarts": step // 700,
        }
        if step % every == 0:
            record |= {"checkpoint_stall_seconds": 0.02, "clipped_share": 0.1, "largest_logit": 12.0 + source.random()}
            for name in ("gradient_norm_by_group", "update_ratio_by_group"):
                record[name] = {group: 0.1 + source.random() for group in ("embedding", "layers 0-0", "head", "norms")}
        yield record


def append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b"\n")


def make_command(began: float, seen: float, **fields: Any) -> CommandRecord:
    """Return the record of a command that began and was last seen so many seconds after BEGAN, by default killed."""
    values: dict[str, Any] = {
        "attempt": f"began-{began}",
        "node": "another",
        "pid": 1,
        "nodes": 1,
        "workers": 2,
        "instance_type": None,
        "chips_per_node": None,
        "dollars_per_node_hour": None,
        "price_source": None,
    }
    return CommandRecord(**values | {"began_at": BEGAN + began, "seen_at": BEGAN + seen} | fields)
