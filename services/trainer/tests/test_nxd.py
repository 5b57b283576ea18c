"""Runs continue checkpoints of NxD, with its optimizer's float32 weights, and export checkpoints for NxD."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import ArtifactError, RecipeError
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.nxd.checkpoint import load_rank_file, write_nxd_model
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.conversion.weight_import import digest_weights
from services.trainer.inspection.sample import load_weights
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import NewJob, train_new, write_recipe
from services.trainer.tests.foreign_checkpoints import (
    Files,
    Program,
    are_equal,
    describe_files,
    draw_weights,
    llama,
    read_all,
    save_files,
)
from services.trainer.tests.runs import call_trainer, checkpoints, train_alone

RANK_0, RANK_3 = "dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_00_tp_rank_03_pp_rank_00.pt"
OF_NXD = ("--format=nxd", "--tensor-parallel-size=2", "--kv-size-multiplier=2", "--qkv-linear")


LAYOUTS = [
    (llama(8), NxdLayout(1)),
    (llama(8), NxdLayout(2, fuse_qkv=True)),
    (llama(2), NxdLayout(2)),
    (llama(2), NxdLayout(4, 2, qkv_linear=True)),
    (llama(2), NxdLayout(4, 4, qkv_linear=True, fuse_qkv=True)),
    (llama(2, tie_word_embeddings=True), NxdLayout(2, 2, qkv_linear=True)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_weights_come_back_from_nxd_bit_for_bit(tmp_path: Path, model: Model, layout: NxdLayout) -> None:
    weights = draw_weights(model)

    write_nxd_model(tmp_path, model, layout, weights.__getitem__)

    assert are_equal(read_all(tmp_path, model), weights)
    expected = describe_files(model, weights, layout)
    found = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "model").iterdir()}
    assert found.keys() == expected.keys()
    assert all(are_equal(state, expected[name]) for name, state in found.items())
    assert (tmp_path / "done").read_text() == (tmp_path / "checkpoint").read_text() == "1"


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"head_dim": 8}])
def test_a_model_that_is_not_nxds_llama_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = llama(2, **changes)

    with pytest.raises(RecipeError, match="head_dim"):
        write_nxd_model(tmp_path, model, NxdLayout(2), draw_weights(model).__getitem__)


@pytest.mark.parametrize(
    ("num_stages", "dtype", "by_tensor"), [(1, torch.float32, True), (2, torch.bfloat16, False)], ids=["xser", "whole"]
)
def test_a_checkpoint_as_nxd_saves_it_is_read(
    tmp_path: Path, tensor_reference: type, num_stages: int, dtype: torch.dtype, by_tensor: bool
) -> None:
    model, layout = llama(), NxdLayout(4, 2, qkv_linear=True)
    weights = {name: weight.to(dtype) for name, weight in draw_weights(model).items()}
    files = describe_files(model, weights, layout, num_stages)
    for state in files.values():
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        for tensor in state.values():
            tensor.requires_grad_()
    save_files(tmp_path, files, reference=tensor_reference if by_tensor else None)
    save_files(tmp_path, {name: {"state": {}, "param_groups": []} for name in files}, kind="optim")  # no masters

    assert are_equal(read_all(tmp_path, model), {name: weight.float() for name, weight in weights.items()})


WRITE_BY_TENSOR = """
import sys, torch, torch_xla, torch_xla.utils.serialization
for path in sys.argv[1:]:
    state = {name: tensor.to(torch_xla.device()) for name, tensor in torch.load(path, weights_only=True).items()}
    torch_xla.utils.serialization.save(state, path, master_only=False)
"""


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is in the neuron images and .venv-torch29 alone")
def test_what_torch_xla_writes_tensor_by_tensor_is_read(tmp_path: Path) -> None:
    model, layout = llama(), NxdLayout(2, qkv_linear=True)
    weights = draw_weights(model)
    save_files(tmp_path, describe_files(model, weights, layout))
    paths = sorted(str(path) for path in (tmp_path / "model").iterdir())
    subprocess.run([sys.executable, "-c", WRITE_BY_TENSOR, *paths], env=os.environ | {"PJRT_DEVICE": "CPU"}, check=True)

    assert len(list((tmp_path / "model").glob("*.tensors"))) == 2
    assert are_equal(read_all(tmp_path, model), weights)


Change = Callable[[Path, Files], object]
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def rewrite(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path, files: Files) -> None:
        change(files)
        for name, state in files.items():
            torch.save(state, folder / "model" / name)

    return apply


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda folder, _: (folder / "done").unlink(), "`done`"),
        (lambda folder, _: (folder / "model" / RANK_0).unlink(), "model: "),
        (lambda folder, _: (folder / "model" / RANK_3).unlink(), "num_attention_heads 8"),
        (lambda folder, _: os.truncate(folder / "model" / RANK_3, 3_000), RANK_3),
        (rewrite(lambda files: files[RANK_0].update(more=torch.ones(1))), "more"),
        (rewrite(lambda files: [state.pop(NORM) for state in files.values()]), NORM),
        (rewrite(lambda files: files[RANK_3].pop(HEAD)), HEAD),
        (rewrite(lambda files: files[RANK_3].update({HEAD: torch.ones(7, 32)})), HEAD),
        (rewrite(lambda files: files[RANK_3].update({HEAD: torch.ones(6, 32).double()})), HEAD),
        (rewrite(lambda files: files[RANK_3][HEAD][0].fill_(float("nan"))), HEAD),
        (rewrite(lambda files: files[RANK_3][NORM].add_(1)), NORM),
        (rewrite(lambda files: files[RANK_3]["model.layers.1.self_attn.qkv_proj.weight_v"][0].add_(1)), "weight_v"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, change: Change, place: str) -> None:
    model = llama()
    files = describe_files(model, draw_weights(model), NxdLayout(4, 2, qkv_linear=True))
    save_files(tmp_path, files)
    change(tmp_path, files)

    with pytest.raises(ArtifactError, match=place):
        read_all(tmp_path, model)


def test_a_file_that_would_run_a_program_is_refused_and_runs_none(tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "model" / "rank.pt"
    file.parent.mkdir()
    torch.save({"weight": torch.zeros(1), "more": Program(made)}, file)

    with pytest.raises(ArtifactError, match=re.escape(str(file))):
        load_rank_file(file)

    assert not made.exists()


MASTERS = "sharded_master_weights"
DATA_RANK_1 = "dp_rank_01_tp_rank_00_pp_rank_00.pt"


def describe_optimizer(files: Files, masters: Files, num_data: int) -> dict[str, Any]:
    """Describe the optimizer of a run with `use_master_weights_in_ckpt`; norms, without decay, are the second group."""
    optimizer = {}
    for name, state in files.items():
        ordered = [masters[name][each] for each in sorted(state, key=lambda each: "norm" in each)]
        for rank in range(num_data):
            shards = {}
            for number, master in enumerate(ordered):
                rows = -(-len(master) // num_data)
                padded = torch.cat((master, torch.zeros(rows * num_data - len(master), *master.shape[1:])))
                shards[number] = padded[rank * rows : (rank + 1) * rows].clone()
            optimizer[name.replace("dp_rank_00", f"dp_rank_{rank:02d}")] = {
                "base_state": {
                    number: {"step": torch.tensor(7.0), "exp_avg": shard} for number, shard in shards.items()
                },
                MASTERS: shards,
            }
    return optimizer


@pytest.mark.parametrize("by_tensor", [False, True], ids=["whole", "xser"])
def test_the_optimizers_masters_are_read_where_it_saved_them(
    tmp_path: Path, tensor_reference: type, by_tensor: bool
) -> None:
    model, layout = llama(), NxdLayout(4, 2, qkv_linear=True, fuse_qkv=True)
    weights = draw_weights(model)
    masters = describe_files(model, weights, layout, num_stages=2)
    files = {name: {key: each.bfloat16() for key, each in state.items()} for name, state in masters.items()}
    for kind, content in (("model", files), ("optim", describe_optimizer(files, masters, num_data=3))):
        save_files(tmp_path, content, kind, tensor_reference if by_tensor else None)
    assert are_equal(read_all(tmp_path, model), weights)

    (tmp_path / "optim" / "dp_rank_01_tp_rank_02_pp_rank_00.pt").unlink()
    with pytest.raises(ArtifactError, match="23 ranks, expected 24"):
        read_all(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda files: [state.pop(MASTERS) for name, state in files.items() if "dp_rank_01" in name], "optim"),
        (lambda files: files[RANK_0][MASTERS].pop(3), RANK_0),
        (lambda files: [files[name][MASTERS].pop(3) for name in (RANK_0, DATA_RANK_1)], "gate_up_proj"),
        (lambda files: files[RANK_0][MASTERS][3].add_(1), "tensor 3"),
        (lambda files: files[DATA_RANK_1][MASTERS][3].add_(1), "gate_up_proj"),
        (lambda files: [files.pop(name) for name in list(files)] + [files.update({"__0_0.distcp": {}})], "optim"),
    ],
)
def test_masters_that_are_not_those_of_the_model_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], place: str
) -> None:
    model, layout = llama(), NxdLayout(2, qkv_linear=True, fuse_qkv=True)
    masters = describe_files(model, draw_weights(model), layout)
    files = {name: {key: each.bfloat16() for key, each in state.items()} for name, state in masters.items()}
    optimizer = describe_optimizer(files, masters, num_data=2)
    change(optimizer)
    save_files(tmp_path, files)
    save_files(tmp_path, optimizer, kind="optim")

    with pytest.raises(ArtifactError, match=place):
        read_all(tmp_path, model)


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        (NxdLayout(3), "num_attention_heads 8"),
        (NxdLayout(4), "kv_size_multiplier 2"),
        (NxdLayout(2, 2), "qkv_linear"),
        (NxdLayout(2, fuse_qkv=True), "fuse_qkv"),
        (NxdLayout(8, 8, qkv_linear=True), "query heads"),
        (NxdLayout(4, 3, qkv_linear=True), "4 ranks"),
    ],
)
def test_a_model_that_nxd_cannot_split_is_not_exported(tmp_path: Path, layout: NxdLayout, place: str) -> None:
    with pytest.raises(RecipeError, match=place):
        write_nxd_model(tmp_path, llama(), layout, lambda name: torch.empty(0))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def trained(new_shared_job: NewJob) -> Path:
    """The folder of a root, `a`, with a run of the small recipe."""
    job = train_new(new_shared_job, train__max_steps="1")
    return job.root.parent


def test_a_run_continues_what_was_exported_for_nxd(capfd: pytest.CaptureFixture[str], trained: Path) -> None:
    recipe, root, tag = write_recipe(trained), trained / "a", trained / "nxd" / "step_1"
    run = open_run(root, next(root.glob("checkpoint/*")).name)
    code, printed = call_trainer(capfd, recipe, root, *OF_NXD, "--fuse-qkv", f"--output={tag}", command="export")
    assert code == 0, printed
    made = "checkpoint config.json done model tokenizer.json tokenizer.model tokenizer_config.json"
    assert sorted(path.name for path in tag.iterdir()) == made.split()

    weights = load_weights(run)
    named = f"--train.initial_weights={digest_weights(parameter_shapes(run.recipe.model), weights.__getitem__)}"
    code, printed = call_trainer(capfd, recipe, root, f"--from={tag}", named, command="import")
    assert code == 0, printed
    begun = open_run(root, Path(re.findall("^.*/step-00000000$", printed, re.MULTILINE)[0]).parent.name)
    assert are_equal(load_weights(begun), weights)
    assert train_alone(capfd, recipe, root, named, "--train.max_steps=2")[0] == 0


def test_an_import_or_export_that_cannot_be_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trained: Path
) -> None:
    recipe, root, tag = write_recipe(trained), trained / "a", tmp_path / "nxd" / "step_1"
    before = checkpoints(root)
    run = before["step-00000001"].parent.name
    for options in (OF_NXD[:1], (OF_NXD[0], "--tensor-parallel-size=0"), OF_NXD[3:], OF_NXD[:2]):
        assert call_trainer(capfd, recipe, root, *options, f"--output={tag}", command="export", run=run)[0] == 2
        assert not tag.exists()
    assert call_trainer(capfd, recipe, root, *OF_NXD, f"--output={tag}", command="export", run=run)[0] == 0

    for removed, source, exit_code in (("", tag.parent, 3), ("config.json", tag, 2), ("done", tag, 3)):
        if removed:
            (tag / removed).unlink()
        assert call_trainer(capfd, recipe, root, f"--from={source}", command="import")[0] == exit_code
    assert checkpoints(root) == before
