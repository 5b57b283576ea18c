"""The float32 weights of NxD's optimizer are imported where a checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import ArtifactError
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.tests.nxd_files import (
    Files,
    are_equal,
    describe_files,
    draw_weights,
    llama,
    read_all,
    save_files,
    save_files_by_tensor,
)

MASTERS = "sharded_master_weights"
RANK_0, RANK_1 = "dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_01_tp_rank_00_pp_rank_00.pt"


def describe_optimizer(files: Files, masters: Files, num_data: int) -> dict[str, Any]:
    """Describe the optimizer of a run with `use_master_weights_in_ckpt`; norms, without decay, are the second group."""
    optimizer = {}
    for name, state in files.items():
        ordered = sorted(state, key=lambda each: "norm" in each)
        padded = {}
        for each in ordered:
            master = masters[name][each]
            rows = -(-len(master) // num_data) * num_data
            padded[each] = torch.cat((master, torch.zeros(rows - len(master), *master.shape[1:])))
        for rank in range(num_data):
            shards = {number: padded[each].chunk(num_data)[rank].clone() for number, each in enumerate(ordered)}
            optimizer[name.replace("dp_rank_00", f"dp_rank_{rank:02d}")] = {
                "state": {},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(shards)}],
                "base_state": {
                    number: {"step": torch.tensor(7.0), "exp_avg": shard} for number, shard in shards.items()
                },
                "shape_info": {number: state[each].shape for number, each in enumerate(ordered)},
                "sharded_master_weights": shards,
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
    optimizer = describe_optimizer(files, masters, num_data=3)
    if by_tensor:
        save_files_by_tensor(tmp_path, files, tensor_reference)
        save_files_by_tensor(tmp_path, optimizer, tensor_reference, kind="optim")
    else:
        save_files(tmp_path, files)
        save_files(tmp_path, optimizer, kind="optim")

    assert are_equal(read_all(tmp_path, model), weights)

    (tmp_path / "optim" / "dp_rank_01_tp_rank_02_pp_rank_00.pt").unlink()
    with pytest.raises(ArtifactError, match="23 ranks, expected 24"):
        read_all(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda files: [state.pop(MASTERS) for name, state in files.items() if "dp_rank_01" in name], "optim"),
        (lambda files: [state.pop(MASTERS) for name, state in files.items() if "tp_rank_01" in name], "optim"),
        (lambda files: files[RANK_0][MASTERS].pop(3), RANK_0),
        (lambda files: [files[name][MASTERS].pop(3) for name in (RANK_0, RANK_1)], "gate_up_proj"),
        (lambda files: files[RANK_0][MASTERS][3].add_(1), "tensor 3"),
        (lambda files: files[RANK_1][MASTERS][3].add_(1), "gate_up_proj"),
        (lambda files: files[RANK_0][MASTERS].update({3: torch.ones(())}), "tensor 3"),
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


def test_an_optimizer_without_masters_leaves_the_models_weights(tmp_path: Path) -> None:
    model = llama()
    files = describe_files(model, draw_weights(model), NxdLayout(2))
    save_files(tmp_path, files)
    save_files(tmp_path, {name: {"state": {}, "param_groups": []} for name in files}, kind="optim")

    assert are_equal(read_all(tmp_path, model), draw_weights(model))
