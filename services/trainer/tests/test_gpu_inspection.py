"""What `doctor` says of a node's GPUs by what the driver's tool tells of them, and what MFU is held against."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.hardware.nvidia_smi import VISIBLE_VARIABLE
from services.common.testing.gpus import H200, install_gpus
from services.trainer.inspection.findings import format_table
from services.trainer.inspection.gpu_inspection import look_at_gpus
from services.trainer.metrics.recorder import published_peak
from services.trainer.tests.builders import make_recipe


@pytest.mark.parametrize(
    ("gpus", "workers", "seen"),
    [
        (
            [H200, H200],
            2,
            r"GPUs +ok +2 x NVIDIA H200 with driver 580.95.05 .*; 2 workers .* against 989 TFLOP/s of each NVIDIA H200",
        ),
        ([H200], 1, r"GPU memory +ok +140\.4 GiB each; a worker takes "),
        ([H200], 4, r"GPUs +problem +1 x NVIDIA H200 .*; 4 workers take one each, so 3 of them would have none"),
        ([], 1, r"GPUs +problem +none .*; 1 workers take one each"),
        (
            [H200 | {"name": "NVIDIA H300"}],
            1,
            r"GPUs +ok .* no peak is known of NVIDIA H300, so the metrics have no mfu",
        ),
        (
            [H200, H200 | {"memory.total": "0"}],
            2,
            r"GPU memory +problem +GPU 1: 0\.0 MiB each; .*\n +next: run `plan`",
        ),
        (
            [H200 | {"memory.used": "120000"}],
            1,
            r"GPU memory +warning +140\.4 GiB .*; other processes hold 117\.2 GiB of GPU 0\n +next: .*nvidia-smi",
        ),
        ([H200, H200 | {"memory.used": "120000"}], 1, r"GPU memory +ok "),  # the only worker takes the other one
        ([H200 | {"memory.total": "[N/A]"}], 1, r"GPU memory +ok +the driver does not tell it"),
    ],
    ids=[
        *(
            "enough",
            "memory",
            "too few",
            "none",
            "unknown kind",
            "too little memory",
            "taken",
            "one is taken",
            "untold",
        ),
    ],
)
def test_the_gpus_of_a_node_are_held_against_its_workers(
    gpus: list[dict[str, str]], workers: int, seen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", gpus)

    table = format_table(list(look_at_gpus(make_recipe(tmp_path, parallel__device="cuda"), workers)))

    assert re.search(seen, table), table


def test_gpus_that_the_environment_hides_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200, H200])
    monkeypatch.setenv(VISIBLE_VARIABLE, "1")

    table = format_table(list(look_at_gpus(make_recipe(tmp_path, parallel__device="cuda"), 2)))

    assert "1 x NVIDIA H200 with driver 580.95.05 (CUDA_VISIBLE_DEVICES: 1); 2 workers" in table
    assert "so 1 of them would have none" in table


def test_mfu_is_held_against_the_instance_type_that_the_recipe_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200])
    recipe = make_recipe(tmp_path, parallel__device="cuda", cluster__trainer_instance_type="p5en.48xlarge")

    assert "MFU is held against the peak of p5en.48xlarge" in format_table(list(look_at_gpus(recipe, 1)))


@pytest.mark.parametrize(
    ("device", "instance_type", "gpus", "peak"),
    [
        ("cuda", None, ["NVIDIA H200", "NVIDIA H200"], 2 * 989e12),
        ("cuda", None, ["NVIDIA H200", "NVIDIA H300"], None),
        ("cuda", "p4d.24xlarge", ["NVIDIA A100-SXM4-40GB"], 312e12),  # of the one GPU that a worker has
        ("neuron", "trn2.48xlarge", [""] * 64, 10672e12),
        ("neuron", None, [""], None),
        ("cpu", "trn2.48xlarge", [""], None),
    ],
)
def test_mfu_is_held_against_the_peak_of_what_the_workers_compute_on(
    device: str, instance_type: str | None, gpus: list[str], peak: float | None, tmp_path: Path
) -> None:
    chosen = {"cluster__trainer_instance_type": instance_type} if instance_type else {}

    assert published_peak(make_recipe(tmp_path, parallel__device=device, **chosen), gpus) == peak
