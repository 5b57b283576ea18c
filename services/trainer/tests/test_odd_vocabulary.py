"""A run whose workers cannot share the vocabulary evenly goes on in any layout, and exports no padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.trainer.conversion.export import export
from services.trainer.job import Job
from services.trainer.metrics.records import read_metrics
from services.trainer.runs.run import open_run
from services.trainer.tests import work
from services.trainer.tests.builders import train_new

ODD = {
    "tokenizer__train__vocab_size": "301",
    "model__vocab_size": "301",
    "model__num_attention_heads": "4",
    "model__num_key_value_heads": "2",
    "checkpoint__interval_steps": "2",
}
LAYOUTS: list[dict[str, str]] = [
    {"parallel__tensor_parallel_size": "2", "parallel__zero_stage": "1"},
    {},
    {"parallel__tensor_parallel_size": "4", "parallel__data_parallel_size": "1"},
]


def test_a_run_with_an_odd_vocabulary_goes_on_in_other_layouts(tmp_path: Path, new_job: Callable[..., Job]) -> None:
    straight = train_new(new_job, "straight", **ODD, train__max_steps="6")
    jobs = [
        new_job("changed", **ODD, **layout, train__max_steps=str(2 * number))
        for number, layout in enumerate(LAYOUTS, start=1)
    ]
    run_workers(inline, work.train_in_turn, jobs, WorkerGroupSpec(4, 1, 4, jobs[0].run_folder))

    changed = jobs[-1]
    expected, found = ([line["loss"] for line in read_metrics(job.run_folder).lines] for job in (straight, changed))
    assert found == pytest.approx(expected, rel=2e-6, abs=0)
    folder = export(open_run(changed.root, changed.run), tmp_path / "x")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert {weights[name].shape[0] for name in ("model.embed_tokens.weight", "lm_head.weight")} == {301}
