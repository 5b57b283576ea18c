"""Checkpoints of torch.distributed.checkpoint that two ranks write, and a Llama as torchtitan names and rotates it."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from services.common.recipe.schema import Model
from services.common.testing.fork_server import start_process
from services.trainer.conversion.dcp import METADATA
from services.trainer.tests.nxd_files import Weights

State = dict[str, Any]
RANKS = 2
NEW_NAMES, OLD_NAMES = ("attention.qkv_linear", "lm_head"), ("attention", "output")
"""torchtitan's names of queries' parent and of the head: of 0.3.0, and of 0.2.2 and before."""


def name_as_torchtitan(weights: Weights, model: Model, names: tuple[str, str] = NEW_NAMES) -> Weights:
    """Name the weights as torchtitan does, and pair neighbours in each head of queries and keys, row by row."""
    attention, head = names
    renamed = {
        "tok_embeddings.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    if not model.tie_word_embeddings:
        renamed[f"{head}.weight"] = weights["lm_head.weight"]
    for number in range(model.num_hidden_layers):
        theirs, ours = f"layers.{number}.", f"model.layers.{number}."
        for kind in "qk":
            renamed[f"{theirs}{attention}.w{kind}.weight"] = pair_neighbours(
                weights[f"{ours}self_attn.{kind}_proj.weight"], model.head_dim
            )
        renamed |= {
            f"{theirs}{attention}.wv.weight": weights[f"{ours}self_attn.v_proj.weight"],
            f"{theirs}attention.wo.weight": weights[f"{ours}self_attn.o_proj.weight"],
            f"{theirs}feed_forward.w1.weight": weights[f"{ours}mlp.gate_proj.weight"],
            f"{theirs}feed_forward.w2.weight": weights[f"{ours}mlp.down_proj.weight"],
            f"{theirs}feed_forward.w3.weight": weights[f"{ours}mlp.up_proj.weight"],
            f"{theirs}attention_norm.weight": weights[f"{ours}input_layernorm.weight"],
            f"{theirs}ffn_norm.weight": weights[f"{ours}post_attention_layernorm.weight"],
        }
    return renamed


def pair_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    half = head_dim // 2
    order = [
        start + offset
        for start in range(0, len(weight), head_dim)
        for pair in range(half)
        for offset in (pair, pair + half)
    ]
    return weight[order]


def torchtitan_logits(weights: Weights, model: Model, tokens_BS: Tensor) -> Tensor:
    """Compute logits as torchtitan's Llama does: neighbours in queries and keys are complex numbers, which rotate."""
    theta, dim = model.rope_theta, model.head_dim
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles_SP = torch.arange(tokens_BS.shape[1]).outer(frequencies).float()
    rotation_SP = torch.polar(torch.ones_like(angles_SP), angles_SP)

    def norm(name: str, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, x_BSD.shape[-1:], weights[name], model.rms_norm_eps)

    def heads(name: str, x_BSD: Tensor) -> Tensor:
        return F.linear(x_BSD, weights[name]).unflatten(-1, (-1, dim)).transpose(1, 2)

    def rotate(x_BNSH: Tensor) -> Tensor:
        pairs_BNSP = torch.view_as_complex(x_BNSH.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs_BNSP * rotation_SP).flatten(-2)

    x_BSD = weights["tok_embeddings.weight"][tokens_BS]
    for number in range(model.num_hidden_layers):
        layer = f"layers.{number}."
        y_BSD = norm(f"{layer}attention_norm.weight", x_BSD)
        q, k, v = (heads(f"{layer}attention.qkv_linear.w{kind}.weight", y_BSD) for kind in "qkv")
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + F.linear(out.transpose(1, 2).flatten(2), weights[f"{layer}attention.wo.weight"])
        y_BSD = norm(f"{layer}ffn_norm.weight", x_BSD)
        gate, up = (F.linear(y_BSD, weights[f"{layer}feed_forward.{name}.weight"]) for name in ("w1", "w3"))
        x_BSD = x_BSD + F.linear(F.silu(gate) * up, weights[f"{layer}feed_forward.w2.weight"])
    return F.linear(norm("norm.weight", x_BSD), weights["lm_head.weight"])


def with_training_state(weights: Mapping[str, Tensor]) -> State:
    """Add what torchtitan saves beside a model: moments by name, settings, the loader's position, the step."""
    return {
        **weights,
        "optimizer": {f"state.{name}.exp_avg": weight + 1 for name, weight in weights.items()}
        | {f"param_groups.{name}.lr": 0.1 for name in weights},
        "lr_scheduler": {"last_epoch": 7},
        "dataloader": {"dp_rank_0": b"position"},
        "train_state": {"step": torch.tensor(7)},
    }


def save(folder: Path, state: State) -> Path:
    """Save a state from this process alone."""
    with warnings.catch_warnings(action="ignore"):
        save_dcp(state, checkpoint_id=folder, no_dist=True)
    return folder


def save_on_two_ranks(states: Mapping[Path, State]) -> None:
    """Save states from two processes with a gloo group, each tensor sharded along rows, columns or not at all."""
    meeting = next(iter(states)).with_name("meeting")
    ranks = [start_process(_save_shards, rank, str(meeting), dict(states)) for rank in range(RANKS)]
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS


def _save_shards(rank: int, meeting: str, states: Mapping[Path, State]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(meeting, RANKS)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def shard(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shard(key, each) for key, each in value.items()}
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        by_column = "wo." in name or "w2." in name or "o_proj" in name or "down_proj" in name
        placement = Replicate() if "ffn_norm" in name else Shard(1 if by_column else 0)
        placed: DTensor = distribute_tensor(value, mesh, [placement])
        return placed

    for folder, state in states.items():
        save_dcp({name: shard(name, value) for name, value in state.items()}, checkpoint_id=folder)
    distributed.destroy_process_group()


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the metadata of a checkpoint; `change` gets torch's own classes."""
    path = folder / METADATA
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
