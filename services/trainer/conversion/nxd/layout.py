"""Maps parameters to the tensors of the ranks of NxD's Llama, by the names of its modules.

The mapping follows `examples/training/llama/modeling_llama_nxd.py` and `modules/qkv_linear.py` of neuronx-distributed
0.18. Names are Hugging Face's, except for two layers that combine several projections: their tensor on a rank has that
rank's parts of all projections, one after the other.
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
    """Split and names of a model in NxD. The fields are NxD's options of the same names."""

    tensor_parallel_size: int
    kv_size_multiplier: int = 1
    """Number of copies of each key-value head, so that every rank has one."""
    qkv_linear: bool = False
    """Whether attention's first projection is a `GQAQKVColumnParallelLinear`, the only one that can have copies."""
    fuse_qkv: bool = False
    """Whether queries, keys and values have one tensor together."""

    def find_misfit(self, model: Model) -> str | None:
        """Return the reason for which NxD cannot split the model by this layout; None if it can."""
        size, copies = self.tensor_parallel_size, self.kv_size_multiplier
        is_grouped = model.num_key_value_heads < model.num_attention_heads
        if model.qk_norm or model.query_size != model.hidden_size:
            return "its Llama has neither QK norm nor a head_dim other than hidden_size / num_attention_heads"
        if copies > 1 and not self.qkv_linear:
            return f"only qkv_linear can have copies of key-value heads, and kv_size_multiplier is {copies}"
        if self.fuse_qkv and is_grouped and not self.qkv_linear:
            return "if a model has fewer key-value heads than heads, fuse_qkv needs qkv_linear"
        if size % copies:
            return f"{copies} copies of key-value heads do not divide {size} ranks"
        if (model.num_attention_heads // model.num_key_value_heads) % copies:
            return f"{copies} copies of a key-value head do not divide its query heads"
        divided = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads x kv_size_multiplier": model.num_key_value_heads * copies,
            "intermediate_size": model.intermediate_size,
            "vocab_size": model.num_vocab_rows,
        }
        return next((f"{size} ranks do not divide {name} {n}" for name, n in divided.items() if n % size), None)


@dataclass(frozen=True)
class Part:
    """Part of a rank's tensor: a slice of one parameter along `dim`, with its heads in NxD's order."""

    name: str
    """Hugging Face's name of the parameter."""
    dim: int | None
    """Dimension along which ranks share the parameter; None if every rank has the whole parameter."""
    heads: Heads | None = None
    """Kind of heads along `dim`, if NxD orders them differently or copies them."""

    def shape(self, full: torch.Size, layout: NxdLayout) -> torch.Size:
        """Return the shape of a rank's slice."""
        copies = layout.kv_size_multiplier if self.heads == "key_value" else 1
        return torch.Size(
            length * copies // layout.tensor_parallel_size if dim == self.dim else length
            for dim, length in enumerate(full)
        )

    def split(self, full: Tensor, layout: NxdLayout, model: Model) -> tuple[Tensor, ...]:
        """Split the full parameter into the slices of all ranks."""
        if self.dim is None:
            return (full,) * layout.tensor_parallel_size
        copies, heads = layout.kv_size_multiplier, model.num_key_value_heads
        if self.heads == "key_value":
            full = full.repeat(copies, 1)
        if self.heads == "query":
            full = _transpose_blocks(full, self.dim, heads, copies)
        return full.chunk(layout.tensor_parallel_size, self.dim)

    def join(self, slices: list[Tensor], layout: NxdLayout, model: Model) -> Tensor:
        """Join the full parameter from the slices of all ranks. Raises `ValueError` if copies differ."""
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
    """Return the parts of a rank's tensors along dimension 0, by NxD's names, in the order of NxD's model."""
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
    """Transpose blocks along a dimension: read them as a matrix, and write its transpose.

    With m copies of K key-value heads, NxD on trn1 stores one copy of all heads after the other (K0 K1 .. K0 K1 ..).
    The query heads of each key-value head form m blocks; NxD stores them in m rows of K instead of K rows of m.
    """
    return full.unflatten(dim, (rows, columns, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _require_equal(tensors: list[Tensor] | tuple[Tensor, ...], kind: str) -> Tensor:
    first, *others = tensors
    for number, other in enumerate(others, start=1):
        if not torch.equal(first, other):
            num_different = int((first != other).sum())
            raise ValueError(f"{kind} {number} differs from {kind} 0 in {num_different:,} of {first.numel():,} values")
    return first
