"""Draws seeds for tests that try other values each time."""

from __future__ import annotations

import os
import random


def draw_seed() -> int:
    """Draw a seed and print it, so that pytest shows it with a failure. `TEST_SEED=17 pytest ...` sets it to 17."""
    seed = int(os.environ.get("TEST_SEED", random.randrange(10**9)))
    print(f"seed {seed}: repeat it with TEST_SEED={seed}")
    return seed
