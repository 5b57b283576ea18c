"""One process traces all graphs that the workers of a whole topology need."""

from __future__ import annotations

import json

import pytest

from services.common.artifacts.files import list_files
from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.program.backends.torch_native import TorchNative
from services.common.testing import fork_server
from services.common.testing.recipes import make_recipe
from services.compiler.tests.work import Gang, GraphKeeper, trace_then_train

fork_server.preload("services.compiler.tests.work")

SPLIT = {"model__num_hidden_layers": "1", "parallel__tensor_parallel_size": "2"}


@pytest.fixture(scope="module", params=[GraphKeeper, pytest.param(TorchNative, marks=pytest.mark.slow)])
def gang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gang:
    """2 models of 2 workers that step and evaluate; after a loss one goes on, until it loses a worker itself."""
    folder, backend = tmp_path_factory.mktemp("gang"), request.param
    two, one = (make_recipe(folder, **SPLIT, parallel__data_parallel_size=models) for models in ("2", "1"))
    gang = Gang(folder, backend, two, one)
    gang.cache.mkdir()
    with fork_server.forking_workers():
        run_workers(inline, trace_then_train, gang, WorkerGroupSpec(4, 1, 4, folder))
    return gang


def test_one_process_traces_every_graph_of_split_models_for_any_number_of_them(gang: Gang) -> None:
    """In the end `resume` loses a worker inside of a compiled graph."""
    missed = [json.loads((gang.folder / f"missed-{rank}.json").read_text()) for rank in range(4)]
    assert missed == [{"started": 0, "resumed": 0}] * 2 + [{"started": 0}] * 2
    traced = json.loads((gang.folder / "traced.json").read_text())
    assert len(traced) >= 5  # forward and backward of a step, evaluation, update, activations of a health measurement
    assert list_files(gang.cache) == traced
