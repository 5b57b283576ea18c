"""The files of a checkpoint make up one state, each element once, of one run, step and layout; or nothing is read."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from services.common.artifacts.checkpoint import CheckpointManifest, shard_name
from services.common.artifacts.store import open_artifact
from services.common.errors import ArtifactError
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.entry_point import exit_code_of
from services.common.program.llama import parameter_shapes
from services.common.testing.manifests import Fields, forge, in_all_of_state, reseal
from services.trainer.__main__ import main
from services.trainer.checkpoints.lookup import verify_state
from services.trainer.checkpoints.safetensors_file import ORIGIN
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.conversion.export import export
from services.trainer.inspection.checkpoint_content import inspect
from services.trainer.inspection.sample import load_weights
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.runs import checkpoints, problem_of, state_hash, vouch_for_files

ALONE = WorkerEnvironment(rank=0, world_size=1)
FILES = (shard_name(0), shard_name(1))
NORM = "weight/model.norm.weight[0:16]"
MOMENT = "exp_avg/model.embed_tokens.weight[0:300,0:16]"

Tensors = dict[str, torch.Tensor]
Files = tuple[Tensors, Tensors]


@pytest.fixture(scope="module")
def two_steps(new_shared_job: Callable[..., Job]) -> Job:
    """A run of one worker with checkpoints after both of its steps, the second one in two files, as an import's is."""
    job = new_shared_job("published", train__max_steps="2", checkpoint__interval_steps="1")
    train(job, ALONE)
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


def give_twice(files: Files) -> None:
    """Another value of the same slice, in the other file."""
    for file in files:
        file[NORM] = file.get(NORM, torch.full((16,), 7.0))


def overlap_boxes(files: Files) -> None:
    whole = holder(files, MOMENT).pop(MOMENT)
    files[0]["exp_avg/model.embed_tokens.weight[0:200,0:16]"] = whole[:200].clone()
    files[1]["exp_avg/model.embed_tokens.weight[199:300,0:16]"] = whole[199:].clone()


def overlap_runs(files: Files) -> None:
    norm = holder(files, NORM).pop(NORM)
    files[0][f"{NORM}.flat[0:9]"] = norm[:9].clone()
    files[1][f"{NORM}.flat[8:16]"] = norm[8:].clone()


def leave_a_gap(files: Files) -> None:
    whole = holder(files, MOMENT).pop(MOMENT)
    files[0]["exp_avg/model.embed_tokens.weight[0:300,0:8]"] = whole[:, :8].clone()
    files[1]["exp_avg/model.embed_tokens.weight[0:300,9:16]"] = whole[:, 9:].clone()


MISFITS = {
    "equal keys": (give_twice, (NORM, f"exists twice: {NORM} in {FILES[0]} and {NORM} in {FILES[1]}")),
    "overlapping boxes": (
        overlap_boxes,
        ("embed_tokens.weight[199:200,0:16] exists twice", "[0:200,0:16] in", "[199:300,0:16] in", *FILES),
    ),
    "overlapping runs": (overlap_runs, ("weight/model.norm.weight[8:9] exists twice", "[0:9]", "[8:16]", *FILES)),
    "a gap": (
        leave_a_gap,
        ("exp_avg/model.embed_tokens.weight[0:300,8:9] is missing, beside", "[0:300,0:8]", "[0:300,9:16]", *FILES),
    ),
    "a tensor that no file has": (
        lambda files: holder(files, MOMENT).pop(MOMENT),
        (f"{MOMENT} is missing: no file has a slice of this tensor",),
    ),
    "one kind's tensor under another kind's name": (
        lambda files: files[0].update(
            {"weight/model.embed_tokens.weight[0:1,0:16]": holder(files, MOMENT)[MOMENT][:1].clone()}
        ),
        ("weight/model.embed_tokens.weight[0:1,0:16] exists twice",),
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_files_that_do_not_have_each_element_once_are_read_by_nothing(job: Job, tmp_path: Path, misfit: str) -> None:
    change, said = MISFITS[misfit]
    rewrite(job.checkpoint_address(2).path, change)

    require_unread(job, tmp_path, *said)


SECOND_MOMENT = MOMENT.replace("exp_avg/", "exp_avg_sq/")


def set_one(key: str, value: float) -> Callable[[Files], None]:
    """A change of the last element of a slice."""

    def change(files: Files) -> None:
        holder(files, key)[key].view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (SECOND_MOMENT, -1e-3, "its lowest value is -0.001"),
        (SECOND_MOMENT, float("nan"), "1 of 4,800 values are NaN or infinite"),
        (MOMENT, float("-inf"), "1 of 4,800 values are NaN or infinite"),
        (NORM, float("nan"), "1 of 16 values are NaN or infinite"),
    ],
)
def test_values_that_no_training_leaves_end_with_3_and_a_run_continues_from_the_checkpoint_before(
    job: Job, capfd: pytest.CaptureFixture[str], tmp_path: Path, key: str, value: float, said: str
) -> None:
    expected = state_hash(job.checkpoint_address(2).path)
    rewrite(job.checkpoint_address(2).path, set_one(key, value))

    problem = problem_of(job, 2)
    options = ["--recipe", str(write_recipe(tmp_path)), "--root", str(job.root)]
    assert exit_code_of(lambda: main(["inspect-checkpoint", *options])) == 3
    printed = capfd.readouterr().err
    train(job, ALONE)

    assert [part for part in (key, said, "step-00000002/shard-0") if part not in problem or part not in printed] == []
    assert state_hash(checkpoints(job.root)["step-00000002"]) == expected


def require_unread(job: Job, tmp_path: Path, *said: str) -> None:
    """Resume, inspection, export, sampling and doctor refuse the newest checkpoint, and say this of it."""
    run = open_run(job.root, job.run)
    told = [problem_of(job, 2)]
    for work in (
        lambda: verify_state(job.recipe, job.corpus, "size")(run.checkpoint),
        lambda: list(inspect(run.checkpoint, job.recipe)),
        lambda: load_weights(run),
        lambda: export(run, tmp_path / "exported"),
    ):
        with pytest.raises(ArtifactError) as caught:
            work()
        told.append(str(caught.value))
    assert [(text, each) for text in told for each in said if each not in text] == []
    assert not (tmp_path / "exported").exists()


def test_what_does_not_fit_ends_with_3_and_a_run_continues_from_the_checkpoint_before(
    job: Job, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected = state_hash(job.checkpoint_address(2).path)
    rewrite(job.checkpoint_address(2).path, give_twice)
    options = ["--recipe", str(write_recipe(tmp_path)), "--root", str(job.root)]

    for command in (["inspect-checkpoint"], ["sample"], ["export", "--output", str(tmp_path / "exported")]):
        assert exit_code_of(lambda: main([*command, *options])) == 3  # noqa: B023 - called at once
        printed = capfd.readouterr()
        assert f"{NORM} exists twice" in printed.err, command
        assert "verified" not in printed.out
    train(job, ALONE)

    assert state_hash(checkpoints(job.root)["step-00000002"]) == expected


def take_from_step_1(folder: Path) -> None:
    """The bytes and checksums are right, but the file is of another step."""
    shutil.copy(folder.with_name("step-00000001") / FILES[0], folder / FILES[0])
    (folder / FILES[1]).unlink()


def change_origin(folder: Path, **changes: Any) -> None:
    tensors, metadata = read(folder / FILES[0])
    origin = {**json.loads(metadata[ORIGIN]), **changes}
    (folder / FILES[0]).write_bytes(safetensors.torch.save(tensors, {ORIGIN: json.dumps(origin)}))


def write_metadata(folder: Path, metadata: dict[str, str] | None) -> None:
    (folder / FILES[0]).write_bytes(safetensors.torch.save(read(folder / FILES[0])[0], metadata))


def of_one_file(fields: Fields) -> None:
    fields["checkpoint"]["shards"].pop(FILES[1])


@pytest.mark.parametrize(
    ("replace_file", "said"),
    [
        (take_from_step_1, "step 1, expected 2"),
        (lambda folder: change_origin(folder, run="small-00000000"), "run small-00000000, expected small-"),
        (lambda folder: change_origin(folder, rank=1), "rank 1, expected 0"),
        (lambda folder: change_origin(folder, data_parallel_size=4), "data_parallel_size 4, expected 1"),
        (lambda folder: change_origin(folder, tensor_parallel_size=4), "tensor_parallel_size 4, expected 1"),
        (lambda folder: change_origin(folder, zero_stage=1), "zero_stage 1, expected 0"),
        (lambda folder: change_origin(folder, program_fingerprint="0" * 64), "program_fingerprint 0000000000"),
        (lambda folder: change_origin(folder, skipped_steps=1), "skipped_steps 1, expected 0"),
        (lambda folder: change_origin(folder, payload_digest="0" * 64), "payload_digest 0000000000"),
        (lambda folder: change_origin(folder, zero_stage=9), "header"),
        (lambda folder: write_metadata(folder, None), "millrace_origin"),
        (lambda folder: write_metadata(folder, {"format": "pt"}), "millrace_origin"),
        (lambda folder: write_metadata(folder, {ORIGIN: "[" * 9_999}), "header"),
    ],
)
def test_a_shard_of_another_state_is_refused_though_the_manifest_has_its_checksums(
    job: Job, tmp_path: Path, replace_file: Callable[[Path], None], said: str
) -> None:
    folder = job.checkpoint_address(2).path
    replace_file(folder)
    forge(folder, (lambda fields: None) if (folder / FILES[1]).exists() else of_one_file)

    require_unread(job, tmp_path, FILES[0], said)


def in_state(**changes: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["checkpoint"].update(changes)


def in_shard(**changes: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["checkpoint"]["shards"][FILES[1]].update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_state(data_parallel_size=2), "data_parallel_size 1, expected 2"),
        (in_state(tensor_parallel_size=2), "tensor_parallel_size 1, expected 2"),
        (in_state(zero_stage=1), "zero_stage 0, expected 1"),
        (in_state(program_fingerprint="0" * 64), "expected 0000000000"),
        (in_state(skipped_steps=1), "skipped_steps 0, expected 1"),
        (in_state(waivers=["--allow-cold-compile"]), "payload_digest "),
        (in_shard(step=1), "step 1, expected 2"),
        (in_shard(run="small-00000000"), "run small-00000000, expected"),
        (in_shard(rank=1), "shards are of 2 ranks up to 1, expected one of each of the 1 workers"),
        (in_all_of_state(data_parallel_size=2), "shards are of 1 ranks up to 0, expected one of each of the 2 workers"),
        (in_all_of_state(data_parallel_size=0), "expected one of each of the 0 workers"),
        (lambda fields: fields["checkpoint"]["shards"].pop(FILES[1]), "shard-00001.safetensors: expected both in"),
        (lambda fields: fields["files"].pop(), "shard-00001.safetensors: expected both in"),
        (in_all_of_state(zero_stage=1), "zero_stage 0, expected 1"),
        (in_all_of_state(skipped_steps=1), "tokens: 256, expected 128"),
        (in_all_of_state(skipped_steps=1, tokens=128), "skipped_steps 0, expected 1"),
        (
            in_all_of_state(waivers=["--allow-cold-compile"]),
            "payload_digest",
        ),
        (in_all_of_state(tokens=1), "tokens: 1, expected 256"),
        (in_state(loss_spikes={"skipped_batches": [{"first": 3, "last": 2}]}), "batches 3 to 2"),
        (in_state(loss_spikes={"skipped_batches": [{"first": 3, "last": 3}] * 2}), "got 3 to 3, 3 to 3"),
        (lambda fields: fields.update(identity_key="0" * 64), f"identity_key: {'0' * 64}, expected "),
        (lambda fields: fields.update(identity_key=fields["identity_key"] + "0"), "0, expected "),
        (lambda fields: fields["recipe"]["train"].update(seed=5), "the identity of its recipe: "),
        (lambda fields: fields["recipe"]["train"].update(seed="x"), "its manifest has a recipe"),
        (lambda fields: fields["inputs"].clear(), "inputs: nothing, expected one corpus"),
        (lambda fields: fields["inputs"][0].update(content_digest="0" * 64), "digests of its inputs: ['0000"),
        (
            lambda fields: fields["inputs"][0].update(content_digest=fields["inputs"][0]["content_digest"] + "0"),
            "0'], expected ['",
        ),
    ],
)
def test_a_resealed_manifest_that_contradicts_its_run_or_its_files_is_refused(
    job: Job, change: Callable[[Fields], object], said: str
) -> None:
    reseal(job.checkpoint_address(2).path, change)

    assert said in problem_of(job, 2)
    with pytest.raises(ArtifactError):
        verify_state(job.recipe, job.corpus)(open_artifact(job.checkpoint_address(2).path, CheckpointManifest))


def test_a_reader_opens_each_file_once_for_its_header(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    really_open = safetensors.safe_open

    def count(path: Path, *arguments: Any) -> Any:
        opened[path.name] += 1
        return really_open(path, *arguments)

    monkeypatch.setattr(safetensors, "safe_open", count)

    ShardReader(open_artifact(job.checkpoint_address(2).path, CheckpointManifest), parameter_shapes(job.recipe.model))

    assert opened == dict.fromkeys(FILES, 1)
