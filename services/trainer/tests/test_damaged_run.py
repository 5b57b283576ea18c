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
import torch

from services.common.artifacts.checkpoint import INDEX_FILE, checkpoint_id, shard_name
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import open_artifact
from services.common.errors import ArtifactError, UnreadableError
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.entry_point import exit_code_of
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.testing.artifacts import publish
from services.common.testing.manifests import forge, in_all_of_state, reseal
from services.trainer.__main__ import main
from services.trainer.checkpoints.loader import find_checkpoint, load_part
from services.trainer.checkpoints.lookup import newest_checkpoint, verify_state
from services.trainer.checkpoints.shards import ORIGIN
from services.trainer.inspection.sample import TextGenerator
from services.trainer.job import RUN_FILE, Job
from services.trainer.loop import train
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.runs import flip_a_bit, problem_of, vouch_for_files
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
def trained(run_of_one_step: Job, tmp_path: Path) -> Job:
    """A run of one step, which a test may change: each starts with the intact files."""
    root = run_of_one_step.root
    shutil.rmtree(root)
    shutil.copytree(root.with_name("intact"), root)
    return replace(run_of_one_step, attempt=tmp_path.name)  # which has verified no file


STATE_SHARD = shard_name(0)


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
    newest, really_open = trained.checkpoint_address(1).path / STATE_SHARD, Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == newest:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableError, match=STATE_SHARD):
        newest_checkpoint(trained.checkpoint_collection)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: json.dumps(json.loads(text) | {"paths": {"corpus": "../../../x"}}),
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
    shard = trained.checkpoint_address(1).path / STATE_SHARD
    with safetensors.safe_open(shard, "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["weight/model.norm.weight[0:16]"][:3] = float("nan")
    shard.write_bytes(safetensors.torch.save(tensors, metadata))
    vouch_for_files(shard.parent)
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


def test_a_compile_cache_is_copied_into_the_nodes_folder(new_job: Callable[..., Job]) -> None:
    job = new_job()
    cache, _ = publish(job.root, job.recipe)

    prepare_node(replace(job, cache=cache))
    folder = compile_cache_folder(job)
    copied = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert sorted(map(str, copied)) == ["ab/inner/one.bin", "two.bin"]


Tables = dict[str, torch.Tensor]


def problem_of_one_of_two(job: Job) -> str:
    """Return why a worker of a layout with two workers cannot load the checkpoint; empty if it can."""
    group = ProcessGroup.fake(2)
    try:
        return problem_of(job, 1, Mesh(0, data_parallel_size=2))
    finally:
        group.leave()


def rewrite_index(folder: Path, change: Callable[[Tables], object], **origin: int) -> None:
    """Write the index again, and a manifest that vouches for it."""
    path = folder / INDEX_FILE
    with safetensors.safe_open(path, "pt") as file:
        written = json.loads(file.metadata()[ORIGIN])
    tables = {key: table.clone() for key, table in safetensors.torch.load_file(path).items()}
    change(tables)
    path.write_bytes(safetensors.torch.save(tables, {ORIGIN: json.dumps(written | origin)}))
    forge(folder)


def test_a_worker_of_another_layout_loads_by_the_index_and_misses_what_it_does_not_have(trained: Job) -> None:
    norm = "weight/model.norm.weight"
    assert problem_of_one_of_two(trained) == ""
    assert newest_checkpoint(trained.checkpoint_collection, verify_state(trained.recipe, trained.corpus))

    rewrite_index(trained.checkpoint_address(1).path, lambda tables: tables.pop(norm))
    assert norm in problem_of_one_of_two(replace(trained, start_number=1))
    assert problem_of(trained, 1) == ""  # a worker of the same layout does not read the index


def test_an_index_of_another_step_and_a_damaged_one_are_refused(trained: Job) -> None:
    folder = trained.checkpoint_address(1).path
    rewrite_index(folder, lambda tables: None, step=2)
    assert INDEX_FILE in problem_of_one_of_two(trained)

    flip_a_bit(folder / INDEX_FILE)
    with pytest.raises(ArtifactError, match=INDEX_FILE):
        newest_checkpoint(trained.checkpoint_collection)
    assert INDEX_FILE in problem_of_one_of_two(replace(trained, start_number=1))


def test_a_worker_of_another_layout_refuses_a_manifest_that_rank_0_has_not_read(trained: Job) -> None:
    found, _ = find_checkpoint(trained, Mesh(0, data_parallel_size=2), 1)
    assert found.checkpoint
    reseal(found.checkpoint.path, in_all_of_state(tokens=found.checkpoint.header.checkpoint.tokens + 1))

    assert MANIFEST in load_part(trained, found.checkpoint, None, {})
