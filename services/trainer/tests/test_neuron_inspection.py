"""`doctor` holds the chips that the driver lists against the workers of the node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.hardware import image_platform
from services.common.testing.recipes import make_recipe
from services.trainer.inspection.findings import Result
from services.trainer.inspection.neuron_inspection import look_at_neuron_cores

ON_TRN2 = {"parallel__device": "neuron", "train__reduction": "fast", "cluster__trainer_instance_type": "trn2.48xlarge"}


@pytest.mark.parametrize(
    ("chips", "workers", "result", "said"),
    [
        (16, 64, Result.OK, "16 chips .* a chip of trn2.48xlarge has 4, each of 2 physical"),
        (16, 128, Result.OK, "a chip of trn2.48xlarge has 8, each of 1 physical"),
        (1, 64, Result.PROBLEM, "so 60 workers would have none"),
        (0, 64, Result.WARNING, "0 chips"),
    ],
    ids=["a core each", "a physical core each", "one chip of the node", "none"],
)
def test_the_chips_of_a_node_are_held_against_its_workers(
    chips: int, workers: int, result: Result, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    for number in range(chips):
        (tmp_path / f"neuron{number}").touch()
    sizes = ("parallel__data_parallel_size", "cluster__trainer_workers_per_node", "batch__global_batch_size")
    recipe = make_recipe(tmp_path, **ON_TRN2, batch__micro_batch_size="1", **dict.fromkeys(sizes, f"{workers}"))

    finding = look_at_neuron_cores(recipe, workers)

    assert finding.result == result
    assert re.search(said, finding.seen)


def test_a_recipe_without_an_instance_type_says_that_the_number_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    (tmp_path / "neuron0").touch()

    finding = look_at_neuron_cores(make_recipe(tmp_path, parallel__device="neuron", train__reduction="fast"), 4)

    assert (finding.result, "unknown" in finding.seen) == (Result.OK, True)
