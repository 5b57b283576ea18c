"""A run with split models and sharded state that is killed repeatedly equals an undisturbed run."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.common.testing.seeds import draw_seed
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import (
    checkpoints,
    kill_session,
    read_run,
    run_trainer,
    start_trainer,
    state_hash,
    workers_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

KILLS = 8
OPTIONS = (
    *("--parallel.tensor_parallel_size=2", "--parallel.data_parallel_size=2", "--parallel.zero_stage=1"),
    *("--batch.global_batch_size=32", "--train.max_steps=60", "--optimizer.decay_steps=60"),
    *("--checkpoint.interval_steps=3", "--train.max_restarts=100"),
)


def outcome(root: Path) -> tuple[str, list[int], list[float]]:
    records = read_run(root).records
    state = state_hash(checkpoints(root)["step-00000060"])
    return state, [record["step"] for record in records], [record["loss"] for record in records]


def test_a_run_that_is_killed_at_random_moments_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Kills hit the whole session like a lost machine, one of four workers, or a worker during a checkpoint."""
    chance = random.Random(draw_seed())
    recipe, root, straight = write_recipe(tmp_path), tmp_path / "fsx", tmp_path / "straight"
    for each in (root, straight):
        make_corpus(each, make_recipe(tmp_path))
    exit_code, output = run_trainer(recipe, straight, *OPTIONS)
    assert exit_code == 0, output

    process = start_trainer(recipe, root, *OPTIONS)
    for number in range(KILLS):
        time.sleep(chance.uniform(0.5, 12.0))
        is_in_a_save = number % 3 == 2
        deadline = time.monotonic() + 60
        while is_in_a_save and process.poll() is None and time.monotonic() < deadline:
            with suppress(FileNotFoundError):  # a folder that was committed between two looks
                if list(root.glob("checkpoint/*/*.partial/shard-*")):
                    break
        if process.poll() is not None:
            break
        workers = workers_of(process)
        if workers and number % 3:
            with suppress(psutil.NoSuchProcess):  # it has ended since
                chance.choice(workers).kill()
        else:
            kill_session(process)
            process = start_trainer(recipe, root, *OPTIONS)
    output, _ = process.communicate(timeout=600)
    if process.returncode == 75:  # a scheduler starts it again
        exit_code, output = run_trainer(recipe, root, *OPTIONS)
        assert exit_code == 0, output

    assert outcome(root) == outcome(straight)
    assert not list(root.glob("checkpoint/*/*.partial"))
