"""torch_xla executes the program on a CPU device as plain PyTorch does, in a handful of graphs.

Its collectives are traced and not run: several CPU devices of one process hang in their rendezvous.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator

import pytest
import torch

from services.common.errors import DeviceError
from services.common.program.backends import neuron_xla
from services.common.program.backends.neuron_xla import NeuronXla, require_pinned
from services.common.program.backends.protocol import Backend
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.recipe import Recipe
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
    """Losses of STEPS steps, of one after the state was read and written again, and of an evaluation."""
    program, losses = Program(recipe, backend), []
    for step in range(STEPS + 1):
        if step == STEPS:
            assert backend.defer({"is_finite": program.is_finite()}).read()["is_finite"]
            saved = {piece: tensor.clone() for piece, tensor in program.held_state().items()}
            for piece, tensor in program.held_state().items():
                tensor.copy_(saved[piece])
            program.update_weights()
        batches = micro_batches_of(recipe, step)
        losses.append(backend.defer(program.train_step(step, batches)._asdict()).read()["loss"])
        if compiled is not None:
            compiled.append(count_compiled())
    losses.append(program.evaluate(batches.__getitem__, len(batches)).item())
    return losses


def count_compiled() -> int:
    from torch_xla.debug import metrics  # noqa: PLC0415

    found = metrics.metric_data("CompileTime")
    return found[0] if found else 0


@needs_torch_xla
def test_losses_are_those_of_plain_pytorch(recipe: Recipe) -> None:
    before, compiled = count_compiled(), list[int]()
    losses = train(recipe, NeuronXla(ALONE, 1, "fast"), compiled)

    assert losses == pytest.approx(train(recipe, TorchNative(ALONE, 1, "fast")), rel=1e-6)
    # A micro-batch's and an update's, then those of the check and the writing; none of a step of its own.
    assert [count - before for count in compiled] == [2] * STEPS + [4]
    assert count_compiled() - before == 5


@needs_torch_xla
def test_no_operation_is_computed_on_the_host_instead(recipe: Recipe) -> None:
    from torch_xla.debug import metrics  # noqa: PLC0415

    metrics.clear_counters()
    train(recipe, NeuronXla(ALONE, 1, "fast"))
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


@needs_torch_xla
def test_what_is_fenced_is_passed_on_with_its_gradient() -> None:
    backend = NeuronXla(ALONE, 1, "fast")
    x = backend.place(torch.tensor([2.0, 3.0])).requires_grad_()
    (gradient,) = torch.autograd.grad((backend.fence(x) * x).sum(), [x])
    assert gradient.tolist() == [4.0, 6.0]


def test_a_switch_that_changes_graphs_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"XLA_HLO_DEBUG=1 is set, .* Unset it: unset XLA_HLO_DEBUG") as raised:
        require_pinned({"XLA_HLO_DEBUG": "1"})
    assert raised.value.exit_code == 4


def test_where_torch_xla_is_absent_the_image_that_has_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(DeviceError, match=r"torch_xla is not here .*make images VARIANT=neuron") as raised:
        neuron_xla.import_torch_xla()
    assert raised.value.exit_code == 4
