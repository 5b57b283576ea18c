"""A run on TorchNeuron's stand-in trains, evaluates, commits checkpoints, resumes and finds its graphs as on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from services.common.testing.recipes import make_recipe, write_recipe
from services.common.testing.torch_neuron.package import write_package
from services.trainer.metrics.records import read_attempts
from services.trainer.tests.builders import make_corpus
from services.trainer.tests.runs import REPOSITORY, read_run, run_trainer

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python, which 2.13 can",
)
LAYOUT = (
    *("--parallel.tensor_parallel_size=2", "--parallel.data_parallel_size=2", "--parallel.zero_stage=1"),
    *("--train.reduction=fast", "--checkpoint.interval_steps=2", "--train.evaluation_interval_steps=2"),
)
OF_TWO = "--parallel.data_parallel_size=1"
EAGER = "--compile.enabled=false"
COMPILED = ("--compile.enabled=true", "--parallel.device=neuron", "--train.max_steps=1")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of this test find the stand-in's package."""
    monkeypatch.setenv("PYTHONPATH", str(write_package(tmp_path / "package")))


def prepare(folder: Path) -> Path:
    """Make a root with a corpus, and return its recipe."""
    folder.mkdir()
    make_corpus(folder / "fsx", make_recipe(folder))
    changes = {"model__num_attention_heads": 4, "model__num_key_value_heads": 2, "model__num_hidden_layers": 1}
    return write_recipe(folder, **changes)


def train(recipe: Path, *options: str) -> None:
    root = recipe.parent / "fsx"
    exit_code, output = run_trainer(recipe, root, *LAYOUT, *options, temporary=recipe.parent)
    assert exit_code == 0, output


def test_four_workers_that_resume_have_the_losses_of_a_cpu_that_did_not_stop(tmp_path: Path) -> None:
    """The model is sharded over two workers, and the optimizer over two."""
    on_cpu, on_device = prepare(tmp_path / "cpu"), prepare(tmp_path / "neuron")
    train(on_cpu, EAGER, "--train.max_steps=4")
    for max_steps in (2, 4):
        train(on_device, EAGER, "--parallel.device=neuron", f"--train.max_steps={max_steps}")

    expected, found = read_run(on_cpu.parent / "fsx"), read_run(on_device.parent / "fsx")
    assert len(found.losses) == 4
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-6)
    assert "resuming after" in found.starts[-1]


@pytest.mark.parametrize("layout", [(OF_TWO,), pytest.param((), marks=pytest.mark.slow)], ids=["two", "four"])
def test_workers_find_all_graphs_that_one_traced_for_them(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """The compiler stage traces as one worker beside fake ones: a graph that depends on the rank would be missing."""
    recipe = prepare(tmp_path / "neuron")
    compiler = [
        sys.executable,
        "-m",
        "services.compiler",
        "--recipe",
        str(recipe),
        "--root",
        str(recipe.parent / "fsx"),
    ]
    done = subprocess.run([*compiler, *LAYOUT, *COMPILED, *layout], cwd=REPOSITORY, env=os.environ, check=False)
    assert done.returncode == 0
    train(recipe, *COMPILED, *layout, "--compile.require_warm=true")

    [run] = [folder for folder in (recipe.parent / "fsx" / "run").iterdir() if folder.is_dir()]
    [attempt] = read_attempts(run).lines
    assert (attempt["graphs_compiled"], attempt["new_cache_files"]) == (0, 0)
