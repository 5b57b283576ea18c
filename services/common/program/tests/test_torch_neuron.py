"""TorchNeuron's stand-in refuses what TorchNeuron refuses, and the program asks it for nothing of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from services.common.testing.torch_neuron.package import write_package

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python, which 2.13 can",
)
REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probe")
    package = write_package(folder / "package")
    command = [sys.executable, "-m", "services.common.testing.torch_neuron.probe", str(folder)]
    environment = {"PYTHONPATH": f"{REPOSITORY}:{package}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_stand_in_refuses_what_torchneuron_refuses(probed: dict[str, Any]) -> None:
    assert probed["refused"] == [
        "a tensor of the host",
        "float64",
        "large int64",
        "a shape that depends on values",
        "another worker's device",
        "a read by the host in a step",
        "dynamic shapes",
        "random numbers",
        "an operation that may run on the host",
    ]


def test_a_step_reads_nothing_on_the_host_and_has_the_losses_of_a_cpu(probed: dict[str, Any]) -> None:
    steps = probed["steps"]
    assert steps["neuron"][0] == steps["cpu"][0]  # the next steps begin from weights of AdamW's other kernel
    assert steps["neuron"] == pytest.approx(steps["cpu"], rel=1e-6)
    assert steps["operations"] > 1_000


def test_a_backward_pass_that_recomputes_computes_no_attention_again(probed: dict[str, Any]) -> None:
    assert probed["attentions"] == probed["layers"]
