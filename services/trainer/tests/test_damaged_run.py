"""Checkpoints, run folders and options are checked before the trainer believes them; damage is named, never job."""

from __future__ import annotations

import errno
import json
import os
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
from services.common.process.entry_point import exit_code_of
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.testing.artifacts import publish
from services.common.testing.manifests import Fields, forge, in_all_of_state, reseal
from services.trainer.__main__ import main
from services.trainer.checkpoints.loader import find_checkpoint, load_part
from services.trainer.checkpoints.lookup import newest_checkpoint, open_checkpoint, verify_state
from services.trainer.checkpoints.shards import ORIGIN
from services.trainer.inspection.sample import TextGenerator
from services.trainer.job import RUN_FILE, Job
from services.trainer.metrics.events import count_events
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import NewJob, train_here, train_new
from services.trainer.tests.runs import checkpoints, flip_a_bit, problem_of, state_hash, vouch_for_files
from services.trainer.workers.node_staging import compile_cache_folder, prepare_node

FILES = (shard_name(0), shard_name(1))
NORM = "weight/model.norm.weight[0:16]"
MOMENT = "exp_avg/model.embed_tokens.weight[0:300,0:16]"
SECOND_MOMENT = MOMENT.replace("exp_avg/", "exp_avg_sq/")

Tensors = dict[str, torch.Tensor]
Files = tuple[Tensors, Tensors]


@pytest.fixture(scope="module")
def two_steps(new_shared_job: NewJob) -> Job:
    """A run of one worker with checkpoints after both of its steps, the second one in two files, as an import's is."""
    job = train_new(new_shared_job, "published", train__max_steps="2", checkpoint__interval_steps="1")
    folder = job.checkpoint_address(2).path
    before = state_hash(folder)
    rewrite(folder, lambda files: move(files, list(files[0])[len(files[0]) // 2 :]))
    assert state_hash(folder) == before
    return job


@pytest.fixture
def job(two_steps: Job, tmp_path: Path) -> Job:
    """A copy of the run, to be changed."""
    shutil.copytree(two_steps.root, tmp_path / "copy")
    return replace(two_steps, root=tmp_path / "copy")


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safetensors.safe_open(path, "pt") as file:
        # Copies: the file that they are mapped from is written again.
        return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118 - no mapping


def rewrite(folder: Path, change: Callable[[Files], object]) -> None:
    """Write both files again, and a manifest that vouches for them."""
    tensors, metadata = read(folder / FILES[0])
    more = read(folder / FILES[1])[0] if (folder / FILES[1]).exists() else {}
    files = (tensors, more)
    change(files)
    for name, content in zip(FILES, files, strict=True):
        (folder / name).write_bytes(safetensors.torch.save(content, metadata))

    origins = dict.fromkeys(FILES, json.loads(metadata[ORIGIN]))
    vouch_for_files(folder, lambda fields: fields["checkpoint"].update(shards=origins))


def move(files: Files, keys: list[str]) -> None:
    files[1].update({key: files[0].pop(key) for key in keys})


def holder(files: Files, key: str) -> Tensors:
    return next(file for file in files if key in file)


def set_last(key: str, value: float) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        holder(files, key)[key].view(-1)[-1] = value

    return change


def test_a_checkpoint_that_this_user_may_not_read_is_not_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one would be continued from, and this one be removed in the end."""
    newest, really_open = job.checkpoint_address(2).path / FILES[0], Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == newest:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableError, match=FILES[0]):
        newest_checkpoint(job.checkpoint_collection)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: json.dumps(json.loads(text) | {"paths": {"corpus": "../../../x"}}),
        lambda text: text.replace('"seed": 0', '"seed": 1'),
        lambda text: "null",
    ],
)
def test_a_run_json_that_is_not_of_its_run_is_refused(job: Job, change: Callable[[str], str]) -> None:
    path = job.run_folder / RUN_FILE
    path.write_text(change(path.read_text()))

    with pytest.raises(ArtifactError):
        open_run(job.root, job.run)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "nan"), ("--temperature", "-1"), ("--seed", "9" * 30), ("--tokens", "-1")],
)
def test_a_sample_that_cannot_be_drawn_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    command = ["sample", "small", "--root", str(tmp_path), option, value]

    assert exit_code_of(lambda: main(command)) == 2
    assert option.strip("-") in capsys.readouterr().err


def test_weights_that_are_not_finite_are_neither_sampled_nor_exported(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(job.checkpoint_address(2).path, set_last(NORM, float("nan")))
    with pytest.raises(ArtifactError):
        TextGenerator(open_run(job.root, job.run)).generate("a", num_tokens=1, temperature=0.7, seed=0)

    command = ["export", job.run, "--root", str(job.root)]
    for number, layout in enumerate(([], ["--format=nxd", "--tensor-parallel-size=1"])):
        output = tmp_path / str(number)
        assert exit_code_of(partial(main, [*command, f"--output={output}", *layout])) == 3
        assert "model.norm.weight" in capsys.readouterr().err
        assert not output.exists()


@pytest.mark.parametrize("content", [b"", b"no vocabulary"])
def test_a_vocabulary_that_its_library_does_not_take_is_named(job: Job, content: bytes) -> None:
    run = open_run(job.root, job.run)
    folder = run.corpus.path
    (folder / "tokenizer" / "tokenizer.model").write_bytes(content)
    forge(folder)

    with pytest.raises(ArtifactError, match=r"tokenizer\.model"):
        TextGenerator(replace(run, corpora={run.recipe.corpus.name: open_artifact(folder, CorpusManifest)}))


def test_a_compile_cache_is_copied_into_the_nodes_folder(new_job: NewJob) -> None:
    job = new_job()
    cache, _ = publish(job.root, job.recipe)

    prepare_node(replace(job, cache=cache))
    folder = compile_cache_folder(job)
    copied = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert sorted(map(str, copied)) == ["ab/inner/one.bin", "two.bin"]


def problem_of_one_of_two(job: Job) -> str:
    """Return why a worker of a layout with two workers cannot load the checkpoint; empty if it can."""
    group = ProcessGroup.fake(2)
    try:
        return problem_of(job, 1, Mesh(0, data_parallel_size=2))
    finally:
        group.leave()


def rewrite_index(folder: Path, change: Callable[[Tensors], object], **origin: int) -> None:
    """Write the index again, and a manifest that vouches for it."""
    path = folder / INDEX_FILE
    with safetensors.safe_open(path, "pt") as file:
        written = json.loads(file.metadata()[ORIGIN])
    tables = {key: table.clone() for key, table in safetensors.torch.load_file(path).items()}
    change(tables)
    path.write_bytes(safetensors.torch.save(tables, {ORIGIN: json.dumps(written | origin)}))
    forge(folder)


def test_a_worker_of_another_layout_loads_by_the_index_and_misses_what_it_does_not_have(job: Job) -> None:
    norm = "weight/model.norm.weight"
    assert problem_of_one_of_two(job) == ""
    assert open_checkpoint(job.checkpoint_collection, 1, verify_state(job.recipe, job.corpus))

    rewrite_index(job.checkpoint_address(1).path, lambda tables: tables.pop(norm))
    assert norm in problem_of_one_of_two(replace(job, start_number=1))
    assert problem_of(job, 1) == ""  # a worker of the same layout does not read the index


def test_an_index_of_another_step_and_a_damaged_one_are_refused(job: Job) -> None:
    folder = job.checkpoint_address(1).path
    rewrite_index(folder, lambda tables: None, step=2)
    assert INDEX_FILE in problem_of_one_of_two(job)

    flip_a_bit(folder / INDEX_FILE)
    with pytest.raises(ArtifactError, match=INDEX_FILE):
        open_checkpoint(job.checkpoint_collection, 1)
    assert INDEX_FILE in problem_of_one_of_two(replace(job, start_number=1))


def test_a_worker_of_another_layout_refuses_a_manifest_that_rank_0_has_not_read(job: Job) -> None:
    found, _ = find_checkpoint(job, Mesh(0, data_parallel_size=2), 1)
    assert found.checkpoint
    reseal(found.checkpoint.path, in_all_of_state(tokens=found.checkpoint.header.checkpoint.tokens + 1))

    assert MANIFEST in load_part(job, found.checkpoint, None, {})


def leave_out(files: Files) -> None:
    del holder(files, MOMENT)[MOMENT]


def write_text(folder: Path) -> None:
    (folder / FILES[1]).write_bytes(b"text")
    forge(folder)


def list_no(path: str) -> Callable[[Fields], None]:
    return lambda fields: fields.update(files=[entry for entry in fields["files"] if entry["path"] != path])


def take_from_step_1(folder: Path) -> None:
    shutil.copy(folder.with_name("step-00000001") / FILES[0], folder / FILES[0])
    forge(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda folder: flip_a_bit(folder / FILES[1]), FILES[1]),
    "a truncated shard": (lambda folder: os.truncate(folder / FILES[0], 1_000), FILES[0]),
    "a missing file": (lambda folder: (folder / FILES[1]).unlink(), FILES[1]),
    "an unlisted shard": (lambda folder: forge(folder, list_no(FILES[0])), FILES[0]),
    "an unlisted index": (lambda folder: forge(folder, list_no(INDEX_FILE)), INDEX_FILE),
    "a torn manifest": (lambda folder: os.truncate(folder / MANIFEST, 100), MANIFEST),
    "a manifest of another step": (lambda folder: forge(folder, in_all_of_state(step=3)), "step-00000002"),
    "another id": (lambda folder: reseal(folder, lambda fields: fields.update(id=checkpoint_id(3))), "step-00000003"),
    "no safetensors file": (write_text, FILES[1]),
    "a shard of another step": (take_from_step_1, FILES[0]),
    "a tensor that no shard has": (lambda folder: rewrite(folder, leave_out), MOMENT),
    "a negative mean of squares": (lambda folder: rewrite(folder, set_last(SECOND_MOMENT, -1e-3)), SECOND_MOMENT),
    "a NaN": (lambda folder: rewrite(folder, set_last(NORM, float("nan"))), NORM),
    "another run's manifest": (lambda folder: reseal(folder, lambda fields: fields.update(name="x")), "x"),
    "another recipe": (lambda folder: reseal(folder, lambda fields: fields.update(identity_key="0" * 64)), "0000"),
    "another corpus": (
        lambda folder: reseal(folder, lambda fields: fields["inputs"][0].update(content_digest="0" * 64)),
        "0000",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_run_continues_from_the_one_before(job: Job, damage: str) -> None:
    folder, (change, place) = job.checkpoint_address(2).path, DAMAGES[damage]
    expected = state_hash(folder)
    change(folder)

    assert place in problem_of(job, 2)
    train_here(job)

    assert state_hash(checkpoints(job.root)["step-00000002"]) == expected
    assert count_events(job.run_folder) == {"fallback": 1}
