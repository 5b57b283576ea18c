"""Checkpoints of NxD and torch.distributed.checkpoint, and a Llama as torchtitan names and rotates it."""

from __future__ import annotations

import os
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

from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Model
from services.common.testing.fork_server import start_process
from services.trainer.conversion.nxd.checkpoint import NxdWeights
from services.trainer.conversion.nxd.layout import NxdLayout

Weights = dict[str, Tensor]
Files = dict[str, Weights]


class Program:
    """An object that makes a folder once a pickle with it is loaded without protection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def llama(num_key_value_heads: int = 2, **changes: Any) -> Model:
    values = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 12, "num_hidden_layers": 2}
    return Model(**values | {"num_attention_heads": 8, "num_key_value_heads": num_key_value_heads} | changes)


def draw_weights(model: Model) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(model).items()}


def describe_files(model: Model, weights: Weights, layout: NxdLayout, num_stages: int = 1) -> Files:
    """Describe the weights as NxD's modules hold them, rank by rank and head by head."""
    size, copies = layout.tensor_parallel_size, layout.kv_size_multiplier
    heads, key_value_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    group = heads // key_value_heads // copies  # query heads that look at one copy of a key-value head
    files: Files = {}
    for rank in range(size):

        def rows(name: str, dim: int = 0, rank: int = rank) -> Tensor:
            return weights[name].chunk(size, dim)[rank].clone()

        def pick(name: str, numbers: list[int], dim: int = 0) -> Tensor:
            each = weights[name].split(head_dim, dim)
            return torch.cat([each[number] for number in numbers], dim)

        per_rank = key_value_heads * copies // size  # of heads and their copies, all first copies before the second
        mine = [divmod(number, key_value_heads)[::-1] for number in range(rank * per_rank, (rank + 1) * per_rank)]
        queries = [(head * copies + copy) * group + number for head, copy in mine for number in range(group)]
        for stage in range(num_stages):
            state: Weights = {}
            if stage == 0:
                state["model.embed_tokens.weight"] = rows("model.embed_tokens.weight")
            for number in range(model.num_hidden_layers)[stage::num_stages]:
                layer = f"model.layers.{number}."
                attention = f"{layer}self_attn."
                q = pick(f"{attention}q_proj.weight", queries)
                k, v = (pick(f"{attention}{letter}_proj.weight", [head for head, _ in mine]) for letter in "kv")
                match layout.qkv_linear, layout.fuse_qkv:
                    case False, False:
                        named = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
                    case False, True:
                        named = {"qkv_proj.weight": torch.cat((q, k, v))}
                    case True, False:
                        named = {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v}
                    case _:
                        named = {"qkv_proj.weight_qkv": torch.cat((q, k, v))}
                state |= {attention + name: tensor for name, tensor in named.items()}
                state[f"{attention}o_proj.weight"] = pick(f"{attention}o_proj.weight", queries, dim=1)
                gate, up = rows(f"{layer}mlp.gate_proj.weight"), rows(f"{layer}mlp.up_proj.weight")
                state[f"{layer}mlp.gate_up_proj.weight"] = torch.cat((gate, up))
                state[f"{layer}mlp.down_proj.weight"] = rows(f"{layer}mlp.down_proj.weight", dim=1)
                for norm in ("input_layernorm", "post_attention_layernorm"):
                    state[f"{layer}{norm}.weight"] = weights[f"{layer}{norm}.weight"].clone()
            if stage == num_stages - 1:
                state["model.norm.weight"] = weights["model.norm.weight"].clone()
                head = "model.embed_tokens" if model.tie_word_embeddings else "lm_head"
                state["lm_head.weight"] = rows(f"{head}.weight")
            files[f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"] = state
    return files


def save_files(folder: Path, files: Mapping[str, Any], kind: str = "model", reference: type | None = None) -> None:
    """Save files into the folder of a tag, as `nxd.save_checkpoint` does; with a class of references, as with
    `use_xser`: each tensor in a file of its own.
    """
    (folder / kind).mkdir(parents=True)
    for name, content in files.items():
        path = folder / kind / name
        torch.save(refer(content, path.with_name(f"{name}.tensors"), reference) if reference else content, path)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")


def refer(value: Any, tensors: Path, reference: type) -> Any:
    """Save all tensors below a value into a folder, and return the value with references in their places."""
    if isinstance(value, dict):
        return {key: refer(each, tensors, reference) for key, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    tensors.mkdir(exist_ok=True)
    referring = reference()
    referring.tid = len(list(tensors.iterdir()))
    torch.save(value, tensors / f"tensor_{referring.tid}.pt")
    return referring


def read_all(folder: Path, model: Model) -> Weights:
    weights = NxdWeights(folder, model)
    return {name: weights.read(name) for name in parameter_shapes(model)}


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


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
            projection = weights[f"{ours}self_attn.{kind}_proj.weight"]
            if model.qk_norm:  # torchtitan's Qwen3 rotates halves
                renamed[f"{theirs}attention.{kind}_norm.weight"] = weights[f"{ours}self_attn.{kind}_norm.weight"]
            else:
                projection = pair_neighbours(projection, model.head_dim)
            renamed[f"{theirs}{attention}.w{kind}.weight"] = projection
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
    """Move row n + head_dim / 2 of each head below its row n. `torchtitan_logits` is the judge."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


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
