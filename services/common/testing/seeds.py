"""Seeds of tests that try something else each time."""

from __future__ import annotations

import os
import random


def draw_seed() -> int:
    """A seed, printed: pytest shows it with the failure. `TEST_SEED=17 pytest ...` draws that one."""
    seed = int(os.environ.get("TEST_SEED", random.randrange(10**9)))
    print(f"seed {seed}: repeat it with TEST_SEED={seed}")
    return seed
