"""`evaluate` gives the numbers of a checkpoint in any layout of workers, and leaves the run alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.common.artifacts.checkpoint import shard_name
from services.common.launch.launcher import WorkerEnvironment
from services.trainer.conversion.export import export
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import Job
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import make_corpus, make_recipe
from services.trainer.tests.runs import call_trainer, checkpoints, flip_a_bit

pytest.importorskip("transformers")  # in no image, so Pants leaves these tests out

ALONE = WorkerEnvironment(rank=0, world_size=1)
WHOLE = ("--train.max_steps=3", "--train.evaluation_tokens=1000000")
ONE = "--parallel.data_parallel_size=1"


def call(
    capfd: pytest.CaptureFixture[str], job: Job, *options: str, root: Path | None = None, command: str = "evaluate"
) -> tuple[int, str]:
    recipe = job.root.parent / "small.toml"
    launch = ("--launch=inline",) if command != "import" else ()
    return call_trainer(capfd, recipe, root or job.root, *launch, *WHOLE, *options, command=command)


def evaluate(capfd: pytest.CaptureFixture[str], job: Job, *options: str, root: Path | None = None) -> dict[str, Any]:
    exit_code, output = call(capfd, job, "--json", *options, root=root)
    assert exit_code == 0, output
    record: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return record


def content(folder: Path) -> dict[str, tuple[int, int]]:
    states = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*")}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}


def test_every_layout_of_workers_gives_the_loss_of_transformers(
    capfd: pytest.CaptureFixture[str], evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    """Any number of workers gives the same bits, which are those of the run's own last evaluation."""
    before = content(evaluated_run.root)
    one, four = (
        evaluate(capfd, evaluated_run, f"--parallel.data_parallel_size={workers}")["loss"] for workers in (1, 4)
    )
    split = evaluate(capfd, evaluated_run, ONE, "--parallel.tensor_parallel_size=2")

    assert one == four == read_evaluations(evaluated_run.run_folder).lines[-1]["loss"]
    assert one == pytest.approx(transformers_losses.mean(), abs=1e-5)
    assert split["loss"] == pytest.approx(transformers_losses.mean(), abs=1e-5)
    assert split["tokens"] == len(transformers_losses)
    assert (split["run"], split["step"]) == (evaluated_run.run, 3)
    part = evaluate(capfd, evaluated_run, ONE, "--tokens=160", "--step=3")
    assert (part["tokens"], part["loss"] != one) == (160, True)
    assert content(evaluated_run.root) == before


def test_another_text_is_evaluated_with_the_same_vocabulary_alone(
    capfd: pytest.CaptureFixture[str], evaluated_run: Job, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path)
    same = make_corpus(tmp_path / "same", recipe, rows=10)
    other = make_corpus(tmp_path / "other", recipe, kind="tokenizer_json")

    record = evaluate(capfd, evaluated_run, ONE, f"--corpus={same.path}")
    assert record["corpus_path"] == str(same.path)
    assert record["tokens"] == 10 * 16 + 4
    exit_code, output = call(capfd, evaluated_run, ONE, f"--corpus={other.path}")
    assert (exit_code, other.manifest.corpus.vocabulary.sha256[:12] in output) == (3, True), output


def test_imported_weights_are_evaluated_before_a_step_by_the_command_and_by_the_run(
    capfd: pytest.CaptureFixture[str], evaluated_run: Job, tmp_path: Path
) -> None:
    folder, root = export(open_run(evaluated_run.root, evaluated_run.run), tmp_path / "model"), tmp_path / "fsx"
    shutil.copytree(evaluated_run.root / "corpus", root / "corpus")
    _, printed = call(capfd, evaluated_run, f"--from={folder}", root=root, command="import")
    found = re.search(r'initial_weights = "([0-9a-f]{64})"', printed)
    assert found, printed
    named = f"--train.initial_weights={found[1]}"
    assert call(capfd, evaluated_run, f"--from={folder}", named, root=root, command="import")[0] == 0

    loss = evaluate(capfd, evaluated_run, ONE, named, root=root)["loss"]
    assert loss == read_evaluations(evaluated_run.run_folder).lines[-1]["loss"]
    assert call(capfd, evaluated_run, ONE, named, root=root, command="train")[0] == 0
    (run_folder,) = root.glob("run/*/")
    first = read_evaluations(run_folder).lines[0]
    assert (first["step"], first["loss"]) == (0, loss)


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--checkpoint={damaged}",), 3, shard_name(0)),
        (("--tokens=0",), 2, "--tokens"),
        (("--step=7",), 3, "one of 3"),
        (("--step=3", "--checkpoint=x"), 2, "--checkpoint"),
        (("--checkpoint={checkpoint}", "--model.rope_theta=500000.0"), 3, "model.rope_theta"),
        (("--checkpoint=nowhere",), 3, "nowhere"),
    ],
)
def test_a_wrong_request_is_refused(
    capfd: pytest.CaptureFixture[str],
    evaluated_run: Job,
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    named: str,
) -> None:
    checkpoint = checkpoints(evaluated_run.root)["step-00000003"]
    damaged = shutil.copytree(checkpoint, tmp_path / "step-00000003")
    flip_a_bit(damaged / shard_name(0))

    filled = (option.format(checkpoint=checkpoint, damaged=damaged) for option in options)
    exit_code, output = call(capfd, evaluated_run, ONE, *filled)

    assert (exit_code, named in output) == (code, True), output
