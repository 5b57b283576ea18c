"""Our layers against those of neuronx-distributed, with sequence parallelism, wherever that can be imported.

`make test-slow PEER=nxd NXD_SOURCE=CHECKOUT` makes an environment in which its source can, without a Neuron package.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.common.errors import DeviceError
from services.common.program.backends.neuron_distributed import require_groups
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.tests import neuron_stand_ins, nxd_parity
from services.common.program.tests.work import run_on_workers


@pytest.fixture(scope="module", autouse=True)
def needs_nxd() -> None:
    try:
        neuron_stand_ins.install()
        importlib.import_module("neuronx_distributed.parallel_layers")
    except ImportError as error:
        reason = (
            f"neuronx_distributed cannot be imported ({error}). It needs torch 2.9, torch_xla 2.9, transformers 4 "
            f"(5 has no transformers.utils.fx) and the Neuron packages, or stand-ins for them: with a checkout of "
            f"github.com/aws-neuron/neuronx-distributed run make test-slow PEER=nxd NXD_SOURCE=CHECKOUT"
        )
        if neuron_stand_ins.SOURCE_VARIABLE in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)


def test_layers_and_loss_have_the_outputs_and_gradients_of_nxd_s(tmp_path: Path) -> None:
    for rank, found in enumerate(run_on_workers(nxd_parity.compare, nxd_parity.WORKERS, tmp_path)):
        assert found["ours"].keys() == found["theirs"].keys()
        for name, ours in found["ours"].items():
            torch.testing.assert_close(ours, found["theirs"][name], rtol=1e-5, atol=1e-6, msg=f"{name} of rank {rank}")


@pytest.fixture
def on_trn1(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Joins a worker group of which only this process exists."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    groups: list[ProcessGroup] = []
    yield lambda world_size: groups.append(ProcessGroup.fake(world_size))
    for group in groups:
        group.leave()


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(0, 16, 8),
        Mesh(0, 4, 32, key_value_copies=4, are_copies_apart=True),
        Mesh(0, 4, 8, key_value_copies=2, are_copies_apart=True),
        Mesh(0, 32, 2),
    ],
    ids=["8", "32, of 4 copies", "8, of 2 copies", "2"],
)
def test_groups_on_trn1_are_those_that_nxd_chooses(mesh: Mesh, on_trn1: Callable[[int], None]) -> None:
    on_trn1(mesh.world_size)
    require_groups(mesh)


@pytest.mark.parametrize(
    ("mesh", "axis"), [(Mesh(0, 8, 4), "tensor"), (Mesh(0, 1, 32, key_value_copies=4), "key_value")]
)
def test_other_groups_than_nxd_s_are_refused(mesh: Mesh, axis: str, on_trn1: Callable[[int], None]) -> None:
    on_trn1(mesh.world_size)
    with pytest.raises(DeviceError, match=f"{axis} axis are .* neuronx-distributed chooses"):
        require_groups(mesh)
