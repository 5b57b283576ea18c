"""torch_xla executes the program on a CPU device as plain PyTorch does, in a handful of graphs.

Its collectives are traced and not run: several CPU devices of one process hang in their rendezvous.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.common.errors import DeviceError
from services.common.hardware import image_platform
from services.common.program.backends.backend import Backend
from services.common.program.backends.neuron_distributed import FlashAttention
from services.common.program.backends.neuron_xla import NeuronXla
from services.common.program.backends.torch_native import TorchNative
from services.common.program.backends.xla_environment import require_pinned, require_runtime
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.recipe.schema import Recipe
from services.common.recipe.training import ActivationCheckpointing
from services.common.testing.recipes import make_recipe

needs_torch_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not here: `make test-torch29` has it"
)
ALONE = Mesh(0, data_parallel_size=1)
STEPS = 10


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


@pytest.fixture
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return make_recipe(tmp_path_factory.mktemp("recipe"), compile__enabled="false", train__reduction="fast")


def train(recipe: Recipe, backend: Backend, compiled: list[int] | None = None) -> list[float]:
    """Losses of STEPS steps, of one after the state was read and written again, and of the targets of an evaluation."""
    program, losses = Program(recipe, backend), []
    for step in range(STEPS + 1):
        if step == STEPS:
            assert backend.read({"is_finite": program.state.is_finite()})["is_finite"]
            saved = {piece: tensor.clone() for piece, tensor in program.state.read().items()}
            with program.state.writing() as held:
                for piece, tensor in held.items():
                    tensor.copy_(saved[piece])
        batches = micro_batches_of(recipe, step)
        losses.append(backend.read(program.train_step(step, batches)._asdict())["loss"])
        if compiled is not None:
            compiled.append(count_compiled())
    losses += torch.cat([backend.to_host(program.evaluate(batch)) for batch in batches]).flatten().tolist()
    return losses


def count_compiled() -> int:
    from torch_xla.debug import metrics  # noqa: PLC0415

    found = metrics.metric_data("CompileTime")
    return found[0] if found else 0


@needs_torch_xla
def test_losses_are_those_of_plain_pytorch_with_no_operation_on_the_host(tmp_path: Path) -> None:
    from torch_xla.debug import metrics  # noqa: PLC0415

    # torch_xla keeps the graphs of a process: no other test may have compiled those that are counted here.
    recipe = make_recipe(tmp_path, compile__enabled="false", train__reduction="fast", model__intermediate_size="72")
    before, compiled = count_compiled(), list[int]()
    metrics.clear_counters()
    losses = train(recipe, NeuronXla(ALONE, 1, "fast"), compiled)

    assert losses == pytest.approx(train(recipe, TorchNative(ALONE, 1, "fast")), rel=1e-6)
    # One graph of the writing of the initial weights, one of a micro-batch and one of an update, later that of the
    # check; no step adds one, and neither does another writing.
    assert [count - before for count in compiled] == [3] * STEPS + [4]
    assert count_compiled() - before == 5
    assert {name for name in metrics.counter_names() if name.startswith("aten::")} <= {"aten::_local_scalar_dense"}


@pytest.fixture
def in_the_middle() -> Iterator[NeuronXla]:
    """Rank 5 of 2 models of 4, of which 2 each hold a key-value head."""
    backend = NeuronXla(Mesh(5, data_parallel_size=2, tensor_parallel_size=4, key_value_copies=2), 1, "fast")
    yield backend
    backend._xla._XLAC._set_all_reduce_token(str(backend.device), None)


@needs_torch_xla
@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("data", "{{0,4},{1,5},{2,6},{3,7}}"),
        ("tensor", "{{0,1,2,3},{4,5,6,7}}"),
        ("key_value", "{{0,1},{2,3},{4,5},{6,7}}"),
    ],
)
def test_collectives_name_the_groups_of_the_topology(in_the_middle: NeuronXla, axis: str, groups: str) -> None:
    backend, size = in_the_middle, in_the_middle.mesh.size(axis)  # type: ignore[arg-type]
    x = backend.place(torch.ones(8, 3))
    results = {
        "all-reduce": backend.all_reduce(x, axis),  # type: ignore[arg-type]
        "all-gather": backend.all_gather(x, axis, dim=1),  # type: ignore[arg-type]
        "reduce-scatter": backend.reduce_scatter(x, axis),  # type: ignore[arg-type]
    }
    assert [tuple(each.shape) for each in results.values()] == [(8, 3), (8, 3 * size), (8 // size, 3)]
    text = backend._xla._XLAC._get_xla_tensors_hlo(list(results.values()))
    for name in results:
        assert re.search(rf"{name}\(.*replica_groups={re.escape(groups)}", text), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_HLO_DEBUG", "1"),
        *((name, value) for name in ("XLA_DOWNCAST_BF16", "XLA_USE_BF16") for value in ("0", "1")),
    ],
)
def test_a_variable_that_changes_graphs_or_rounds_behind_the_program_s_back_is_refused(name: str, value: str) -> None:
    with pytest.raises(DeviceError, match=f"{name}={value} .*unset {name}") as raised:
        require_pinned({name: value})
    assert raised.value.exit_code == 4


@needs_torch_xla
def test_what_computes_and_how_it_is_compiled_is_part_of_the_facts(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_host = NeuronXla.facts(recipe)
    assert on_the_host["pjrt_device"] == "CPU"
    assert on_the_host["compiler_flags"] == ["--target=trn1"]
    monkeypatch.delenv("PJRT_DEVICE")
    assert NeuronXla.facts(recipe)["pjrt_device"] == "NEURON"
    # As a worker of a run has them.
    of_cache = NeuronXla.cache_environment(Path("cache"), recipe)
    for name, value in of_cache.items():
        monkeypatch.setenv(name, value)
    assert NeuronXla.facts(recipe) | {"pjrt_device": "CPU", "flash_attention": ""} == on_the_host | {
        "flash_attention": ""
    }
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    with pytest.raises(DeviceError, match=r"NEURON_CC_FLAGS='-O3'.*'--target=trn1'"):
        NeuronXla.facts(recipe)


def test_nothing_is_computed_on_the_host_of_a_node_without_neuron_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    with pytest.raises(DeviceError, match=r"libneuronxla.*/dev/neuron0.*PJRT_DEVICE=CPU") as raised:
        require_runtime({})
    assert raised.value.exit_code == 4
    monkeypatch.delenv("PJRT_DEVICE")
    with pytest.raises(DeviceError, match="/dev/neuron0"):  # torch_xla is not imported before
        NeuronXla(ALONE, 1, "fast")
    (tmp_path / "neuron0").touch()
    with pytest.raises(DeviceError, match="libneuronxla"):
        require_runtime({"PJRT_DEVICE": "NEURON"})
    require_runtime({"PJRT_DEVICE": "CPU"})
    with pytest.raises(DeviceError, match="PJRT_DEVICE=TPU"):
        require_runtime({"PJRT_DEVICE": "TPU"})


class Unclaimed(NeuronXla):
    """The backend on a node that passes the checks for a NeuronCore."""

    def _claim_device(self) -> None:
        pass


@needs_torch_xla
def test_another_device_than_the_one_that_was_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla has opened its CPU device before the variable says NEURON."""
    NeuronXla(ALONE, 1, "fast")
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(DeviceError, match=r"CPU device.*PJRT_DEVICE is NEURON") as raised:
        Unclaimed(ALONE, 1, "fast")
    assert raised.value.exit_code == 4


@needs_torch_xla
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_computed_again_has_the_same_losses(
    recipe: Recipe, tmp_path: Path, mode: ActivationCheckpointing
) -> None:
    """The bits may differ: XLA fuses a recomputed layer in another way, and so rounds between other operations."""
    again = make_recipe(
        tmp_path, compile__enabled="false", train__reduction="fast", train__activation_checkpointing=mode
    )
    expected = train(recipe, NeuronXla(ALONE, 1, "fast"))
    assert train(again, NeuronXla(ALONE, 1, "fast")) == pytest.approx(expected, rel=1e-6)


@needs_torch_xla
def test_nxds_kernel_attends_where_it_takes_the_sequence(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once for each of the two which attention runs."""
    caplog.set_level(logging.INFO)
    backend = NeuronXla(ALONE, 1, "fast")
    backend._why_without_nxd = ""
    backend._flash_attention = FlashAttention(lambda q, k, v, **options: q + 1, "trn1")
    for _ in range(2):
        for length, expected in ((2048, 2.0), (16, 1.0)):
            x_BHSN = torch.ones(1, 2, length, 8, dtype=torch.bfloat16, device=backend.device)
            assert backend.attend(x_BHSN, x_BHSN, x_BHSN, None).cpu().eq(expected).all()
    assert len(caplog.records) == 2
