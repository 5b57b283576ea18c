"""What one process traces for a whole topology is all that its workers need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.artifacts.files import list_files
from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec
from services.common.program.backends.torch_native import TorchNative
from services.common.testing.recipes import make_recipe
from services.compiler.tests.work import Gang, GraphKeeper, trace_then_train

SPLIT = {"model__num_hidden_layers": "1", "parallel__tensor_parallel_size": "2"}


@pytest.mark.parametrize("backend", [GraphKeeper, pytest.param(TorchNative, marks=pytest.mark.slow)])
def test_one_process_traces_every_graph_of_split_models_for_any_number_of_them(
    tmp_path: Path, backend: type[TorchNative]
) -> None:
    """2 models of 2 workers step and evaluate, and after a loss one of them goes on."""
    two, one = (make_recipe(tmp_path, **SPLIT, parallel__data_parallel_size=models) for models in ("2", "1"))
    gang = Gang(tmp_path, backend, two, one)
    gang.cache.mkdir()
    inline.run_workers(trace_then_train, gang, WorkerGroupSpec(4, 1, 4, tmp_path))

    missed = [json.loads((tmp_path / f"missed-{rank}.json").read_text()) for rank in range(4)]
    assert missed == [[0, 0], [0, 0], [0], [0]]
    traced = json.loads(gang.traced.read_text())
    assert len(traced) >= 4  # forward and backward of a step, evaluation, update
    assert list_files(gang.cache) == traced
