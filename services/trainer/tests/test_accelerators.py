"""`doctor` compares a node's accelerators with its workers; MFU is relative to the peak of what they compute on."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.hardware import image_platform
from services.common.hardware.gpus import VISIBLE_VARIABLE
from services.common.testing.gpus import H200, install_gpus
from services.trainer.inspection.findings import Result
from services.trainer.inspection.node import check_gpu_memory, check_gpus, check_neuron_cores
from services.trainer.metrics.recorder import published_peak
from services.trainer.tests.builders import make_recipe

OK, WARNING, PROBLEM = Result.OK, Result.WARNING, Result.PROBLEM


@pytest.mark.parametrize(
    ("gpus", "visible", "workers", "number", "memory"),
    [
        ([H200, H200], None, 2, OK, OK),
        ([H200, H200], "1", 2, PROBLEM, OK),
        ([], None, 1, PROBLEM, OK),
        ([H200, H200 | {"memory.total": "0"}], None, 2, OK, PROBLEM),
        ([H200 | {"memory.used": "120000"}], None, 1, OK, WARNING),
        ([H200, H200 | {"memory.used": "120000"}], None, 1, OK, OK),  # the only worker takes the other one
        ([H200 | {"memory.total": "[N/A]"}], None, 1, OK, OK),
    ],
    ids=["enough", "hidden", "none", "too little memory", "taken", "one is taken", "unknown memory"],
)
def test_the_gpus_of_a_node_are_compared_with_its_workers(
    gpus: list[dict[str, str]],
    visible: str | None,
    workers: int,
    number: Result,
    memory: Result,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", gpus)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_VARIABLE, visible)

    assert check_gpus(workers).result == number
    assert check_gpu_memory(make_recipe(tmp_path, parallel__device="cuda"), workers).result == memory


@pytest.mark.parametrize(
    ("chips", "workers", "result", "seen"),
    [
        (16, 64, OK, "has 4, each of 2 physical"),
        (16, 128, OK, "has 8, each of 1 physical"),
        (1, 64, PROBLEM, "60 too few"),
        (0, 64, WARNING, "0 chips"),
    ],
)
def test_the_chips_of_a_node_are_compared_with_its_workers(
    chips: int, workers: int, result: Result, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    for number in range(chips):
        (tmp_path / f"neuron{number}").touch()
    sizes = ("parallel__data_parallel_size", "cluster__trainer_workers_per_node", "batch__global_batch_size")
    on_trn2 = {"parallel__device": "neuron", "train__reduction": "fast", "batch__micro_batch_size": "1"}
    instance = {"cluster__trainer_instance_type": "trn2.48xlarge", **dict.fromkeys(sizes, f"{workers}")}

    found = check_neuron_cores(make_recipe(tmp_path, **on_trn2, **instance), workers)

    assert (found.result, seen in found.seen) == (result, True), found
    if chips:
        assert check_neuron_cores(make_recipe(tmp_path, **on_trn2), workers).result == OK


@pytest.mark.parametrize(
    ("device", "instance_type", "gpus", "peak"),
    [
        ("cuda", None, ["NVIDIA H200", "NVIDIA H200"], 2 * 989e12),
        ("cuda", None, ["NVIDIA H200", "NVIDIA H300"], None),
        ("neuron", "trn2.48xlarge", [""] * 64, 10672e12),
        ("neuron", None, [""], None),
        ("cpu", "trn2.48xlarge", [""], None),
    ],
)
def test_mfu_is_relative_to_the_peak_of_what_the_workers_compute_on(
    device: str, instance_type: str | None, gpus: list[str], peak: float | None, tmp_path: Path
) -> None:
    chosen = {"cluster__trainer_instance_type": instance_type} if instance_type else {}

    assert published_peak(make_recipe(tmp_path, parallel__device=device, **chosen), gpus) == peak
