"""Which part of which parameter a rank of NxD's Llama has, by the names of its modules.

As in `examples/training/llama/modeling_llama_nxd.py` and `modules/qkv_linear.py` of neuronx-distributed 0.18. Names are
Hugging Face's, but for two layers that are several projections at once: their tensor on a rank has that rank's part of
each, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.common.recipe.schema import Model

Heads = Literal["query", "key_value"]


@dataclass(frozen=True)
class NxdLayout:
    """How a model is split and named. The fields are NxD's own options, of the same names."""

    tensor_parallel_size: int
    kv_size_multiplier: int = 1
    """Copies of every key-value head, so that there is one for each rank."""
    qkv_linear: bool = False
    """Attention's first projection is `GQAQKVColumnParallelLinear`, which alone can have copies."""
    fuse_qkv: bool = False
    """It is one tensor."""

    def find_misfit(self, model: Model) -> str | None:
        """Why NxD cannot split this model so; None where it can."""
        size, copies = self.tensor_parallel_size, self.kv_size_multiplier
        is_grouped = model.num_key_value_heads < model.num_attention_heads
        if copies > 1 and not self.qkv_linear:
            return f"only its qkv_linear has copies of key-value heads, and there are {copies}"
        if self.fuse_qkv and is_grouped and not self.qkv_linear:
            return "of a model with fewer key-value heads than heads, only its qkv_linear can be fused"
        if size % copies:
            return f"{copies} copies of key-value heads do not divide {size} ranks"
        if (model.num_attention_heads // model.num_key_value_heads) % copies:
            return f"{copies} copies of a key-value head do not divide the query heads that look at it"
        divided = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads x kv_size_multiplier": model.num_key_value_heads * copies,
            "intermediate_size": model.intermediate_size,
            "vocab_size": model.vocab_size,
        }
        return next((f"{size} ranks do not divide {name} {n}" for name, n in divided.items() if n % size), None)


@dataclass(frozen=True)
class Part:
    """What a rank's tensor has of one parameter: a slice of it along `dim`, once its heads are in NxD's order."""

    name: str
    """Of the parameter, as Hugging Face has it."""
    dim: int | None
    """None: every rank has all of it."""
    heads: Heads | None = None
    """What lies along `dim`, where NxD has it in another order or several times."""

    def shape(self, full: torch.Size, layout: NxdLayout) -> torch.Size:
        """Of a rank's slice."""
        copies = layout.kv_size_multiplier if self.heads == "key_value" else 1
        return torch.Size(
            length * copies // layout.tensor_parallel_size if dim == self.dim else length
            for dim, length in enumerate(full)
        )

    def split(self, full: Tensor, layout: NxdLayout, model: Model) -> tuple[Tensor, ...]:
        """The slice of each rank."""
        if self.dim is None:
            return (full,) * layout.tensor_parallel_size
        copies, heads = layout.kv_size_multiplier, model.num_key_value_heads
        if self.heads == "key_value":
            full = full.repeat(copies, 1)
        if self.heads == "query":
            full = _transpose_blocks(full, self.dim, heads, copies)
        return full.chunk(layout.tensor_parallel_size, self.dim)

    def join(self, slices: list[Tensor], layout: NxdLayout, model: Model) -> Tensor:
        """The full parameter from the slices of all ranks. Raises `ValueError` where copies of it differ."""
        copies, heads = layout.kv_size_multiplier, model.num_key_value_heads
        if self.dim is None:
            return _require_equal(slices, "rank")
        joined = torch.cat(slices, self.dim)
        if self.heads == "key_value":
            return _require_equal(joined.chunk(copies), "copy")
        if self.heads == "query":
            return _transpose_blocks(joined, self.dim, copies, heads)
        return joined


def rank_tensors(model: Model, layout: NxdLayout) -> dict[str, tuple[Part, ...]]:
    """NxD's names, in its model's order, and what a rank's tensor has along dimension 0, one part after the other."""
    tensors: dict[str, tuple[Part, ...]] = {"model.embed_tokens.weight": (Part("model.embed_tokens.weight", 0),)}
    for number in range(model.num_hidden_layers):
        layer = f"model.layers.{number}."
        tensors |= {layer + name: parts for name, parts in _attention(f"{layer}self_attn.", layout).items()}
        tensors |= {
            f"{layer}mlp.gate_up_proj.weight": tuple(
                Part(f"{layer}mlp.{name}.weight", 0) for name in ("gate_proj", "up_proj")
            ),
            f"{layer}mlp.down_proj.weight": (Part(f"{layer}mlp.down_proj.weight", 1),),
        }
        norms = (f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight")
        tensors |= {name: (Part(name, None),) for name in norms}
    head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    return tensors | {"model.norm.weight": (Part("model.norm.weight", None),), "lm_head.weight": (Part(head, 0),)}


def _attention(prefix: str, layout: NxdLayout) -> dict[str, tuple[Part, ...]]:
    kinds: dict[str, Heads] = {"q": "query", "k": "key_value", "v": "key_value"}
    parts = {letter: Part(f"{prefix}{letter}_proj.weight", 0, heads) for letter, heads in kinds.items()}
    output = {"self_attn.o_proj.weight": (Part(f"{prefix}o_proj.weight", 1, "query"),)}
    match layout.qkv_linear, layout.fuse_qkv:
        case True, True:
            named = {"qkv_proj.weight_qkv": tuple(parts.values())}
        case True, False:
            named = {f"qkv_proj.weight_{letter}": (part,) for letter, part in parts.items()}
        case False, True:
            named = {"qkv_proj.weight": tuple(parts.values())}
        case _:
            named = {f"{letter}_proj.weight": (part,) for letter, part in parts.items()}
    return {f"self_attn.{name}": parts for name, parts in named.items()} | output


def _transpose_blocks(full: Tensor, dim: int, rows: int, columns: int) -> Tensor:
    """Read blocks along a dimension as a matrix, and write it transposed.

    With m copies of K key-value heads, NxD has the copies one after the other (K0 K1 .. K0 K1 ..: on trn1), so query
    heads, of which m blocks look at each key-value head, are not in rows of m any more but in rows of K.
    """
    return full.unflatten(dim, (rows, columns, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _require_equal(tensors: list[Tensor] | tuple[Tensor, ...], kind: str) -> Tensor:
    first, *others = tensors
    for number, other in enumerate(others, start=1):
        if not torch.equal(first, other):
            num_different = int((first != other).sum())
            raise ValueError(f"{kind} {number} differs from {kind} 0 in {num_different:,} of {first.numel():,} values")
    return first
