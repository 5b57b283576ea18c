"""Checkpoints of NxD, written file by file for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.program.llama import parameter_shapes
from services.common.recipe.schema import Model
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
            length = weights[name].shape[dim] // size
            return weights[name].narrow(dim, rank * length, length).clone()

        per_rank = key_value_heads * copies // size
        held = [(number % key_value_heads, number // key_value_heads) for number in range(key_value_heads * copies)]
        mine = held[rank * per_rank : (rank + 1) * per_rank]  # which head, and which copy of it
        queries = [(head * copies + copy) * group + number for head, copy in mine for number in range(group)]

        def pick(name: str, numbers: list[int], dim: int = 0) -> Tensor:
            each = weights[name].split(head_dim, dim)
            return torch.cat([each[number] for number in numbers], dim)

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


def save_files(folder: Path, files: Mapping[str, Any], kind: str = "model") -> Path:
    """Save files into the folder of a tag, as `nxd.save_checkpoint` does."""
    (folder / kind).mkdir(parents=True)
    for name, content in files.items():
        torch.save(content, folder / kind / name)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")
    return folder


def save_files_by_tensor(folder: Path, files: Mapping[str, Any], reference: type, kind: str = "model") -> Path:
    """Save files into the folder of a tag, as a run with `use_xser` does."""
    for name, content in files.items():
        tensors = folder / kind / f"{name}.tensors"
        tensors.mkdir(parents=True)
        count = 0

        def save(value: Any, tensors: Path = tensors) -> Any:
            nonlocal count
            if isinstance(value, dict):
                return {key: save(each) for key, each in value.items()}
            if not isinstance(value, Tensor):
                return value
            torch.save(value, tensors / f"tensor_{count}.pt")
            referring = reference()
            referring.tid, count = count, count + 1
            return referring

        torch.save(save(content), folder / kind / name)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")
    return folder


def read_all(folder: Path, model: Model) -> Weights:
    weights = NxdWeights(folder, model)
    return {name: weights.read(name) for name in parameter_shapes(model)}


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
