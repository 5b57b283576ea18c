"""Finds a Llama's weights among the names of a DCP checkpoint: Hugging Face's names, or torchtitan's.

torchtitan's names changed: `output` became `lm_head` and `attention.wq` became `attention.qkv_linear.wq` (0.3.0). Its
Llama rotates pairs of neighbours, (0, 1), (2, 3) and so on of a head, where Hugging Face's rotates (0, N / 2),
(1, N / 2 + 1) and so on; so the rows of its queries and keys have another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from services.common.recipe.schema import Model

HUGGING_FACE, TORCHTITAN = "model.embed_tokens.weight", "tok_embeddings.weight"
"""The embedding's name tells whose names they are, and what is in front of them."""
COMPANIONS = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
"""First parts of names beside a model's: the rest of a training state, and torchtitan's table of rotary positions."""

_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "output": "lm_head",
}
_LAYER_MODULES = {
    **{f"attention.{old}w{kind}": f"self_attn.{kind}_proj" for old in ("", "qkv_linear.") for kind in "qkv"},
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WEIGHT = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.weight")


@dataclass(frozen=True)
class NamedModel:
    """Maps the weights of a Llama to the tensors of a checkpoint that hold them."""

    is_torchtitans: bool
    stored: Mapping[str, str]
    """The names in the checkpoint, by Hugging Face's; a name that torchtitan's Llama has not stays as it is."""
    ignored: tuple[str, ...]


def find_model(names: Iterable[str], values: Iterable[str]) -> NamedModel:
    """Find a model among the names of tensors. `values` are the names of what is no tensor: all of them are ignored.

    Raises `ValueError` unless the checkpoint has one model.
    """
    names = tuple(names)
    found = [
        (embedding, name.removesuffix(embedding))
        for embedding in (HUGGING_FACE, TORCHTITAN)
        for name in names
        if _is_model(name) and (name == embedding or name.endswith(f".{embedding}"))
    ]
    if len(found) != 1:
        many = (
            f"{len(found)} embeddings ({', '.join(prefix + name for name, prefix in found[:3])})" if found else "none"
        )
        raise ValueError(f"it has {many}, expected one {HUGGING_FACE} or {TORCHTITAN}")
    [(embedding, prefix)] = found
    owned = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix) and _is_model(name)}
    mine = {name: own for name, own in owned.items() if _is_model(own)}
    is_torchtitans = embedding == TORCHTITAN
    stored: dict[str, str] = {}
    for name, own in mine.items():
        target = _hugging_face_name(own) if is_torchtitans else own
        if target in stored:
            raise ValueError(f"{stored[target]} and {name} are the same weight")
        stored[target] = name
    return NamedModel(is_torchtitans, stored, (*(name for name in names if name not in mine), *values))


def pair_halves(name: str, weight: Tensor, model: Model) -> Tensor:
    """Order the rows of torchtitan's queries or keys as Hugging Face does; other weights stay as they are."""
    if not name.endswith((".q_proj.weight", ".k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _is_model(name: str) -> bool:
    return name.partition(".")[0] not in COMPANIONS


def _hugging_face_name(name: str) -> str:
    match = _WEIGHT.fullmatch(name)
    if match is None:
        return name
    layer, module = match.groups()
    if layer is None:
        return f"{_MODULES[module]}.weight" if module in _MODULES else name
    return f"model.layers.{layer}.{_LAYER_MODULES[module]}.weight" if module in _LAYER_MODULES else name
