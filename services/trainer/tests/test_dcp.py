"""Runs begin with checkpoints of torch.distributed.checkpoint: with Hugging Face's names, and with torchtitan's."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import ArtifactError
from services.common.program.transformer import parameter_shapes
from services.common.recipe.file import load_recipe
from services.trainer.conversion.dcp import METADATA, DcpWeights
from services.trainer.conversion.export import export
from services.trainer.inspection.sample import load_model
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import NewJob, train_new, write_recipe
from services.trainer.tests.foreign_checkpoints import (
    OLD_NAMES,
    Program,
    Weights,
    are_equal,
    draw_weights,
    llama,
    name_as_torchtitan,
    save,
    save_on_two_ranks,
    torchtitan_logits,
    with_training_state,
)
from services.trainer.tests.runs import call_trainer
from services.trainer.tests.test_import import digest_in

MODEL = llama(2)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return draw_weights(MODEL)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> dict[str, Path]:
    """The same weights, saved by two ranks under several names, alone and with a training state."""
    folder = tmp_path_factory.mktemp("saved")
    theirs = name_as_torchtitan(weights, MODEL)
    older = name_as_torchtitan(weights, MODEL, OLD_NAMES)
    states: dict[str, dict[str, Any]] = {
        "hugging-face": dict(weights),
        "hugging-face in a training state": {"model": dict(weights), "optim": {"state": dict(weights)}, "step": 3},
        "torchtitan": with_training_state(theirs),
        "older torchtitan": {"model": older | {"freqs_cis": torch.ones(4, 2, dtype=torch.complex64)}},
    }
    save_on_two_ranks({folder / name: state for name, state in states.items()})
    return {name: folder / name for name in states}


def read_all(folder: Path) -> Weights:
    chunks = DcpWeights(folder, MODEL)
    return {name: chunks.read(name) for name in parameter_shapes(MODEL)}


def test_weights_of_two_ranks_come_back_bit_for_bit(saved: dict[str, Path], weights: Weights) -> None:
    for name, folder in saved.items():
        assert sorted(path.name for path in folder.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
        assert DcpWeights(folder, MODEL).is_torchtitans == ("torchtitan" in name)
        assert are_equal(read_all(folder), weights), name


@pytest.mark.parametrize("names", ["hugging-face", "torchtitan"])
def test_a_qwen3_comes_back_bit_for_bit(tmp_path: Path, names: str) -> None:
    """torchtitan's has the rows of queries and keys in the order of Hugging Face's."""
    model = llama(2, qk_norm=True, head_dim=6)
    weights = draw_weights(model)
    folder = save(tmp_path / "step-3", name_as_torchtitan(weights, model) if names == "torchtitan" else weights)

    chunks = DcpWeights(folder, model)
    assert are_equal({name: chunks.read(name) for name in parameter_shapes(model)}, weights)


@pytest.fixture(scope="module")
def exported(new_shared_job: NewJob) -> Path:
    """The Hugging Face folder of a trained model, beside the root of its run."""
    job = train_new(new_shared_job, train__max_steps="3")
    return export(open_run(job.root, job.run), job.root.parent / "hugging-face")


def import_from(capfd: pytest.CaptureFixture[str], exported: Path, source: Path, *options: str) -> tuple[int, str]:
    recipe, root = write_recipe(exported.parent), exported.parent / "a"
    return call_trainer(capfd, recipe, root, f"--from={source}", *options, command="import")


@pytest.mark.parametrize("names", ["hugging-face", "torchtitan"])
def test_an_imported_model_gives_the_logits_of_the_model_that_was_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exported: Path, names: str
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    model = load_recipe(write_recipe(exported.parent)).model
    saved = dict(theirs.state_dict())
    tokens_BS = torch.randint(0, model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    if names == "torchtitan":
        saved = name_as_torchtitan(saved, model)
        logits = torchtitan_logits(saved, model, tokens_BS)
        torch.testing.assert_close(logits, theirs(tokens_BS).logits, rtol=1e-4, atol=1e-5)  # the same model
    source = save(tmp_path / "step-3", with_training_state(saved))

    config = json.loads((exported / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    code, printed = import_from(capfd, exported, source)
    assert (code, "rms_norm_eps" in printed) == (2, True), printed
    (source / "config.json").write_text(json.dumps(config))
    named = f"--train.initial_weights={digest_in(import_from(capfd, exported, source)[1])}"
    code, printed = import_from(capfd, exported, source, named, f"--train.data_seed={len(names)}")
    assert code == 0, printed

    first = Path(printed.splitlines()[0])
    run = open_run(exported.parent / "a", first.parent.name)
    assert torch.equal(load_model(run).logits(tokens_BS), theirs(tokens_BS).logits)


def test_a_tied_model_needs_no_head_and_types_may_be_mixed(tmp_path: Path) -> None:
    model, kinds = llama(2, tie_word_embeddings=True), (torch.float32, torch.bfloat16, torch.float16)
    weights = {name: weight.to(kinds[n % 3]) for n, (name, weight) in enumerate(draw_weights(model).items())}
    twice = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}

    for number, state in enumerate((weights, name_as_torchtitan(weights, model), twice)):
        chunks = DcpWeights(save(tmp_path / str(number), dict(state)), model)
        found = {name: chunks.read(name) for name in parameter_shapes(model)}
        assert are_equal(found, {name: weight.float() for name, weight in weights.items()})


def test_metadata_that_would_run_a_program_is_refused_and_runs_none(tmp_path: Path, weights: Weights) -> None:
    source, made = save(tmp_path / "step-3", dict(weights)), tmp_path / "made"
    metadata = pickle.loads((source / METADATA).read_bytes())
    content = pickle.dumps(dataclasses.replace(metadata, planner_data=Program(made)))
    (source / METADATA).write_bytes(content)

    with pytest.raises(ArtifactError, match=METADATA):
        DcpWeights(source, MODEL)

    assert not made.exists()
    pickle.loads(content)
    assert made.exists()


HEAD, FILE = "lm_head.weight", "__0_0.distcp"
Change = Callable[[Path], object]


def leave_out_head(folder: Path) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    del metadata.state_dict_metadata[HEAD]
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def flip_in_chunk(folder: Path) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == HEAD)
    content = bytearray((folder / FILE).read_bytes())
    content[place.offset + place.length // 2] ^= 1
    (folder / FILE).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda folder: (folder / METADATA).write_bytes(b""), METADATA),
        (lambda folder: os.truncate(folder / METADATA, 1_000), METADATA),
        (lambda folder: (folder / FILE).unlink(), FILE),
        (lambda folder: os.truncate(folder / FILE, 10_000), "step-3"),
        (flip_in_chunk, HEAD),
        (leave_out_head, HEAD),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    tmp_path: Path, weights: Weights, change: Change, place: str
) -> None:
    source = save(tmp_path / "step-3", dict(weights))
    change(source)

    with pytest.raises(ArtifactError, match=place):
        read_all(source)


def test_queries_fused_as_torchtitan_did_between_two_releases_are_refused(tmp_path: Path, weights: Weights) -> None:
    theirs, parent = name_as_torchtitan(weights, MODEL), "layers.0.attention.qkv_linear"
    theirs[f"{parent}.wqkv.weight"] = torch.cat([theirs.pop(f"{parent}.w{kind}.weight") for kind in "qkv"])

    with pytest.raises(ArtifactError, match="wqkv"):
        read_all(save(tmp_path / "step-3", dict(theirs)))


def test_the_folder_above_names_its_checkpoints_and_an_unfinished_save_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    for step in (3, 6):
        save(tmp_path / f"step-{step}", {"step": step})

    code, printed = import_from(capfd, exported, tmp_path)

    assert (code, "step-3, step-6" in printed) == (3, True), printed

    (tmp_path / "step-3" / METADATA).unlink()  # is written last
    code, printed = import_from(capfd, exported, tmp_path / "step-3")
    assert (code, METADATA in printed) == (3, True), printed
