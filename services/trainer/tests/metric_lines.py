"""Lines of `metrics.jsonl`, `attempts.jsonl` and `commands.jsonl` that tests write."""

from __future__ import annotations

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


ATTEMPT = {
    "started_at": 1.6e9,
    "setup_seconds": 1.0,
    "train_seconds": 2.0,
    "graphs_compiled": 0,
    "new_cache_files": 0,
}


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
