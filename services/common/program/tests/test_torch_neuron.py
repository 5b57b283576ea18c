"""TorchNeuron's stand-in refuses what TorchNeuron refuses, and the program asks it for nothing of that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils import backend_registration

from services.common.testing.commands import run_python
from services.common.testing.torch_neuron.package import write_package

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python, which 2.13 can",
)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probe")
    package = write_package(folder / "package")
    done = run_python(["-m", "services.common.testing.torch_neuron.probe", str(folder)], PYTHONPATH=str(package))
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_stand_in_refuses_what_torchneuron_refuses(probed: dict[str, Any]) -> None:
    assert probed["taken"] == ["an addition"]


def test_a_step_reads_nothing_on_the_host_and_recomputes_no_attention(probed: dict[str, Any]) -> None:
    """The backward pass of selective activation checkpointing keeps the results of slow operations."""
    assert probed["attentions"] == probed["layers"] > 0
