"""A run whose workers cannot share the vocabulary evenly goes on in any layout, and exports no padding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.trainer.conversion.export import export
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.records import read_metrics
from services.trainer.run import open_run
from services.trainer.tests import work

ODD = {
    "tokenizer__train__vocab_size": "301",
    "model__vocab_size": "301",
    "model__num_attention_heads": "4",
    "model__num_key_value_heads": "2",
    "checkpoint__interval_steps": "2",
}
LAYOUTS = {
    "whole": {},
    "split": {"parallel__tensor_parallel_size": "2", "parallel__zero_stage": "1"},
    "in four": {"parallel__tensor_parallel_size": "4", "parallel__data_parallel_size": "1"},
}


@pytest.mark.parametrize(("first", "second"), [("split", "whole"), ("in four", "split"), ("whole", "in four")])
def test_a_run_with_an_odd_vocabulary_goes_on_in_another_layout(
    tmp_path: Path, new_job: Callable[..., Job], first: str, second: str
) -> None:
    straight = new_job("straight", **ODD, train__max_steps="4")
    train(straight, WorkerEnvironment(rank=0, world_size=1))
    begun = new_job("changed", **ODD, **LAYOUTS[first], train__max_steps="2")
    changed = new_job("changed", **ODD, **LAYOUTS[second], train__max_steps="4")
    run_workers(inline, work.train_in_turn, [begun, changed], WorkerGroupSpec(4, 1, 4, begun.run_folder))

    expected, found = ([line["loss"] for line in read_metrics(job.run_folder).lines] for job in (straight, changed))
    assert found == pytest.approx(expected, rel=2e-6, abs=0)
    shutil.rmtree(changed.checkpoint_address(2).path)
    weights = safetensors.torch.load_file(
        export(open_run(changed.root, changed.run), tmp_path / "x") / "model.safetensors"
    )
    assert {weights[name].shape[0] for name in ("model.embed_tokens.weight", "lm_head.weight")} == {301}
