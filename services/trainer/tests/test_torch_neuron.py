"""A run on TorchNeuron's stand-in trains, evaluates, commits checkpoints, resumes and finds its graphs as on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import backend_registration

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.store import open_artifact
from services.common.hardware.image_platform import NATIVE
from services.common.testing.recipes import make_recipe, write_recipe
from services.common.testing.torch_neuron.package import write_package
from services.trainer.metrics.records import read_attempts
from services.trainer.tests.builders import make_corpus
from services.trainer.tests.runs import REPOSITORY, read_run, run_trainer, train_alone

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python, which 2.13 can",
)
EVERY = ("--train.reduction=fast", "--checkpoint.interval_steps=2", "--train.evaluation_interval_steps=2")
LAYOUT = ("--parallel.tensor_parallel_size=2", "--parallel.data_parallel_size=2", "--parallel.zero_stage=1", *EVERY)
EAGER = "--compile.enabled=false"
COMPILED = (
    *("--compile.enabled=true", "--parallel.device=neuron", "--train.max_steps=1"),
    "--cluster.trainer_instance_type=trn2.48xlarge",
)
WARM = "--compile.require_warm=true"
GRAPHS_OF_A_MODEL = len(NATIVE.graphs) - 1
"""Graphs with collectives of the workers that share a model: all but the update's."""


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the processes of these tests find the stand-in's package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(write_package(tmp_path_factory.mktemp("package"))))
        yield


def prepare(folder: Path) -> Path:
    """Make a root with a corpus, and return its recipe."""
    folder.mkdir()
    make_corpus(folder / "fsx", make_recipe(folder))
    changes = {"model__num_attention_heads": 4, "model__num_key_value_heads": 2, "model__num_hidden_layers": 1}
    return write_recipe(folder, **changes)


def train(recipe: Path, *options: str) -> None:
    exit_code, output = run_trainer(recipe, recipe.parent / "fsx", *LAYOUT, *options, temporary=recipe.parent)
    assert exit_code == 0, output


def test_four_workers_that_resume_have_the_losses_of_one_on_a_cpu_that_did_not_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model is sharded over two workers, and the optimizer over two."""
    on_cpu, on_device = prepare(tmp_path / "cpu"), prepare(tmp_path / "neuron")
    exit_code, output = train_alone(capfd, on_cpu, on_cpu.parent / "fsx", *EVERY, EAGER, "--train.max_steps=4")
    assert exit_code == 0, output
    for max_steps in (2, 4):
        train(on_device, EAGER, "--parallel.device=neuron", f"--train.max_steps={max_steps}")

    expected, found = read_run(on_cpu.parent / "fsx"), read_run(on_device.parent / "fsx")
    assert len(found.losses) == 4
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-6)
    assert "resuming after" in found.starts[-1]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose compile cache was made without a device, for two models of two workers; returns its recipe."""
    recipe = prepare(tmp_path_factory.mktemp("compiled") / "neuron")
    command = [sys.executable, "-m", "services.compiler", "--recipe", str(recipe), "--root", str(recipe.parent / "fsx")]
    options = (*LAYOUT, *COMPILED, "--compile.trace_on=cpu")
    done = subprocess.run([*command, *options], cwd=REPOSITORY, env=os.environ, check=False)
    assert done.returncode == 0
    return recipe


def test_a_cache_holds_the_graphs_of_each_model_and_those_that_all_share(compiled: Path) -> None:
    """On TorchNeuron a graph lists the workers of its model. A graph that depended on the rank would be counted too."""
    [cache] = compiled.parent.glob("fsx/compile_cache/neuron/*/")
    manifest = open_artifact(cache, CompileCacheManifest).manifest
    neffs = [entry.path for entry in manifest.files if entry.path.endswith(".neff")]
    num_updates = len(neffs) - 2 * GRAPHS_OF_A_MODEL
    assert manifest.compile_cache.graphs_compiled == len(neffs)
    assert num_updates == 3  # one for each length of a bucket's blocks


def test_workers_of_both_models_find_all_graphs_that_others_traced_for_them(compiled: Path) -> None:
    train(compiled, *COMPILED, WARM)
    [run] = [folder for folder in (compiled.parent / "fsx" / "run").iterdir() if folder.is_dir()]
    [attempt] = read_attempts(run)
    assert (attempt["graphs_compiled"], attempt["new_cache_files"]) == (0, 0)


def test_a_run_of_other_shapes_ends_with_the_function_whose_graph_is_missing(compiled: Path) -> None:
    options = (*EVERY, *COMPILED, WARM, "--parallel.data_parallel_size=1", "--batch.micro_batch_size=1")
    root = compiled.parent / "fsx"
    exit_code, output = run_trainer(compiled, root, *options, "--allow-cold-compile", temporary=compiled.parent)
    assert exit_code == 4, output
    assert "Program._micro_losses (1 in all)" in output
