"""Checkpoints, run folders and options are checked before the trainer believes them."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch

from services.common.artifacts.checkpoint import INDEX_FILE, checkpoint_id, shard_name, step_of
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import open_artifact
from services.common.errors import ArtifactError, UnreadableError
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.entry_point import exit_code_of
from services.common.testing.artifacts import publish
from services.common.testing.manifests import forge, in_all_of_state
from services.trainer.__main__ import main
from services.trainer.checkpoints.lookup import newest_checkpoint
from services.trainer.inspection.sample import TextGenerator
from services.trainer.job import RUN_FILE, Job
from services.trainer.loop import train
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.runs import vouch_for_files
from services.trainer.workers.node_staging import compile_cache_folder, prepare_node

ALONE = WorkerEnvironment(rank=0, world_size=1)
Change = Callable[[dict[str, Any]], object]


def list_no(path: str) -> Change:
    return lambda fields: fields.update(files=[entry for entry in fields["files"] if entry["path"] != path])


@pytest.fixture(scope="module")
def run_of_one_step(new_shared_job: Callable[..., Job]) -> Job:
    job = new_shared_job(train__max_steps="1", checkpoint__interval_steps="1")
    train(job, ALONE)
    shutil.copytree(job.root, job.root.with_name("intact"))
    return job


@pytest.fixture
def trained(run_of_one_step: Job) -> Job:
    """A run of one step, which a test may change: each begins with the intact files."""
    root = run_of_one_step.root
    shutil.rmtree(root)
    shutil.copytree(root.with_name("intact"), root)
    return run_of_one_step


STATE_SHARD = shard_name(0)
NORM = "weight/model.norm.weight[0:16]"


def rewrite_tensors(folder: Path, change: Change) -> None:
    with safetensors.safe_open(folder / STATE_SHARD, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(folder / STATE_SHARD)
    change(tensors)
    (folder / STATE_SHARD).write_bytes(safetensors.torch.save(tensors, metadata))
    vouch_for_files(folder)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (in_all_of_state(step=2), "step-00000001"),
        (lambda fields: fields.update(id=checkpoint_id(2)), "step-00000002"),
        (list_no(STATE_SHARD), STATE_SHARD),
        (list_no(INDEX_FILE), INDEX_FILE),
    ],
)
def test_a_checkpoint_that_is_not_what_its_place_says_is_damaged(trained: Job, change: Change, place: str) -> None:
    forge(trained.checkpoint_address(1).path, change)

    with pytest.raises(ArtifactError, match=place):
        newest_checkpoint(trained.checkpoint_collection)


def test_a_file_that_holds_no_tensors_is_refused(trained: Job) -> None:
    (trained.checkpoint_address(1).path / STATE_SHARD).write_bytes(b"\xff" * 100)
    forge(trained.checkpoint_address(1).path)

    with pytest.raises(ArtifactError, match=STATE_SHARD):
        train(trained, ALONE)


def test_a_checkpoint_that_this_user_may_not_read_is_not_passed_over(
    trained: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be continued from, and this one be removed in the end."""
    newest = trained.checkpoint_address(1).path / STATE_SHARD
    really_open = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == newest:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(UnreadableError, match=STATE_SHARD):
        newest_checkpoint(trained.checkpoint_collection)


def change_run(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    "change",
    [
        change_run(paths={"corpus": "../../../x"}),
        lambda text: text.replace('"seed": 0', '"seed": 1'),
        lambda text: "null",
    ],
)
def test_a_run_json_that_is_not_of_its_run_is_refused(trained: Job, change: Callable[[str], str]) -> None:
    path = trained.run_folder / RUN_FILE
    path.write_text(change(path.read_text()))

    with pytest.raises(ArtifactError):
        open_run(trained.root, trained.run)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "nan"), ("--temperature", "-1"), ("--seed", "9" * 30), ("--tokens", "-1")],
)
def test_a_sample_that_cannot_be_drawn_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    command = ["sample", "--recipe", str(write_recipe(tmp_path)), "--root", str(tmp_path), option, value]

    assert exit_code_of(lambda: main(command)) == 2
    assert option.strip("-") in capsys.readouterr().err


def test_weights_that_are_not_finite_write_nothing_and_are_exported_where_that_is_asked_for_alone(
    trained: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_tensors(trained.checkpoint_address(1).path, lambda tensors: tensors[NORM][:3].fill_(float("nan")))
    with pytest.raises(ArtifactError):
        TextGenerator(open_run(trained.root, trained.run)).generate("a", num_tokens=1, temperature=0.7, seed=0)

    command = ["export", "--recipe", str(write_recipe(tmp_path)), "--root", str(trained.root)]
    for number, layout in enumerate(([], ["--format=nxd", "--tensor-parallel-size=1"])):
        output = tmp_path / str(number)
        named = [*command, f"--output={output}", *layout]
        assert exit_code_of(partial(main, named)) == 3
        assert "model.norm.weight" in capsys.readouterr().err
        assert not output.exists()
        assert exit_code_of(partial(main, [*named, "--allow-non-finite-weights"])) == 0
        assert output.exists()


@pytest.mark.parametrize("content", [b"", b"no vocabulary"])
def test_a_vocabulary_that_its_library_does_not_take_is_named(trained: Job, content: bytes) -> None:
    folder = trained.corpus.path
    (folder / "tokenizer" / "tokenizer.model").write_bytes(content)
    run = open_run(trained.root, trained.run)
    forge(folder)

    with pytest.raises(ArtifactError, match=r"tokenizer\.model"):
        TextGenerator(replace(run, corpus=open_artifact(folder, CorpusManifest)))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000007", 7),
        ("step-100000000", 100_000_000),
        ("step-7", None),
        ("step-00000007.partial", None),
    ],
)
def test_a_checkpoints_name_is_its_step(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_compile_cache_is_copied_into_the_nodes_folder(new_job: Callable[..., Job]) -> None:
    job = new_job()
    cache, _ = publish(job.root, job.recipe)

    prepare_node(replace(job, cache=cache))
    folder = compile_cache_folder(job)
    copied = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert sorted(map(str, copied)) == ["ab/inner/one.bin", "two.bin"]
