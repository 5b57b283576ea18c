"""Llama and dense Qwen3 with Hugging Face's parameter names, so that a checkpoint needs no converter.

In eager float32, logits and every gradient are bit-equal to those of transformers' `LlamaForCausalLM`, or with QK norm
`Qwen3ForCausalLM`, with SDPA attention. The order of the operations below is part of that promise.

Shape suffixes: B sequences, S positions, D hidden size, H query heads, K key-value heads, N head dimension,
F intermediate size, V vocabulary with its padding, T = B * S tokens, and t ranks of the tensor axis (see `layers`).
The cosines and sines of rotary positions are [S, N], or [B, 1, S, N] where positions restart at each document.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.program.backends.backend import Collectives
from services.common.program.layers import (
    ColumnParallelLinear,
    Linear,
    RMSNorm,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelLinear,
    cut_padding,
    gather_sequence,
    reduce_scatter_sequence,
)
from services.common.program.sharding import Sharding
from services.common.recipe.schema import Model, RopeScaling
from services.common.recipe.training import ActivationCheckpointing


class Transformer(nn.Module):
    """One rank's shard of the model, which is the whole model on one rank.

    `forward` stops before the language-model head, which the loss applies in chunks (see `loss`).
    """

    def __init__(
        self,
        config: Model,
        sequence_length: int,
        collectives: Collectives | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make a model without values. Activations and their gradients are summed over the tensor axis in
        `reduce_dtype`, or in their own dtype where that is wider.
        """
        super().__init__()
        self.collectives = collectives or Collectives()
        self.model = _Decoder(config, sequence_length, self.collectives, activation_checkpointing, reduce_dtype)
        self.lm_head = VocabularyParallelLinear(config.hidden_size, config.num_vocab_rows, self.collectives.mesh)
        self._vocab_size = config.vocab_size
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the normalised final hidden states [B, S / t, D] of this rank's slice of the sequence.

        `positions_BS` are the tokens' distances from the starts of their documents: attention then stays within
        documents, and rotary positions are these. Without them a sequence is one document.
        """
        return self.model(tokens_BS, positions_BS)

    def logits(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the logits of the id that follows each position, [B, S, `vocab_size`], for a model on one rank."""
        assert self.collectives.mesh.tensor_parallel_size == 1
        lm_head_VD = cut_padding(self.lm_head.weight, self._vocab_size, self.collectives)
        return F.linear(self(tokens_BS, positions_BS), lm_head_VD)

    def linear_weights(self) -> set[str]:
        """Return the names of the weights that linear layers alone use, which autocast rounds at each use."""
        linear = [name for name, module in self.named_modules() if isinstance(module, Linear)]
        return {f"{name}.weight" for name in linear} & {name for name, _ in self.named_parameters()}

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of each parameter, by its name."""
        return {name: self.get_submodule(name.rpartition(".")[0]).sharding for name, _ in self.named_parameters()}  # type: ignore[misc]


def parameter_shapes(config: Model) -> dict[str, torch.Size]:
    """Return the shapes of the full parameters, by name."""
    with torch.device("meta"):
        model = Transformer(config, sequence_length=1)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


class _Decoder(nn.Module):
    def __init__(
        self,
        config: Model,
        sequence_length: int,
        collectives: Collectives,
        activation_checkpointing: ActivationCheckpointing,
        reduce_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._collectives, self._activation_checkpointing = collectives, activation_checkpointing
        self.embed_tokens = VocabularyParallelEmbedding(config.num_vocab_rows, config.hidden_size, collectives)
        self.layers = nn.ModuleList(_Layer(config, collectives, reduce_dtype) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives.mesh)
        weight = self.embed_tokens.weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        cos_SN, sin_SN = (table_SN.to(device) for table_SN in rotary_table(config, sequence_length))
        self.register_buffer("cos_SN", cos_SN, persistent=False)
        self.register_buffer("sin_SN", sin_SN, persistent=False)
        indices_S = torch.arange(sequence_length, dtype=torch.int32, device="cpu").to(device)
        self.register_buffer("indices_S", indices_S, persistent=False)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        return self.norm(self.run_layers(tokens_BS, positions_BS))

    def run_layers(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Return the activations after the last layer, which the final norm has not seen."""
        hidden_BSD = self.embed(tokens_BS)
        positions = self.read_positions(tokens_BS.shape[1], positions_BS)
        for layer in self.layers:
            hidden_BSD = self.run_layer(layer, hidden_BSD, *positions)
        return hidden_BSD

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the activations before the first layer."""
        rows_BSD = self.embed_tokens(tokens_BS)
        # One rank has a token's row and the others have zeros, so the sum is exact in the rows' own dtype.
        return reduce_scatter_sequence(rows_BSD, self._collectives, rows_BSD.dtype)

    def read_positions(self, length: int, positions_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what every layer reads of the positions: cosines and sines, and the mask where there are documents."""
        cos, sin = self.cos_SN[:length], self.sin_SN[:length]  # type: ignore[index]
        if positions_BS is None:
            return cos, sin, None
        cos, sin = cos[positions_BS][:, None], sin[positions_BS][:, None]
        return cos, sin, block_causal_mask(positions_BS, self.indices_S[:length])[:, None]  # type: ignore[index]

    def run_layer(
        self, layer: nn.Module, hidden_BSD: Tensor, cos: Tensor, sin: Tensor, mask_B1SS: Tensor | None
    ) -> Tensor:
        return self._collectives.run_checkpointed(
            layer, self._activation_checkpointing, hidden_BSD, cos, sin, mask_B1SS
        )


class _Layer(nn.Module):
    def __init__(self, config: Model, collectives: Collectives, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = _Attention(config, collectives, reduce_dtype)
        self.mlp = _FeedForward(config, collectives, reduce_dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives.mesh)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives.mesh)

    def forward(self, hidden_BSD: Tensor, cos: Tensor, sin: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), cos, sin, mask_B1SS)
        return hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))


class _Attention(nn.Module):
    """Attention of this rank's query heads to the key-value heads that belong to them."""

    def __init__(self, config: Model, collectives: Collectives, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        self._collectives, self._reduce_dtype, mesh = collectives, reduce_dtype, collectives.mesh
        self.head_dim = config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, config.query_size, mesh, heads="query")
        self.k_proj = ColumnParallelLinear(config.hidden_size, key_value_size, mesh, heads="key_value")
        self.v_proj = ColumnParallelLinear(config.hidden_size, key_value_size, mesh, heads="key_value")
        self.o_proj = RowParallelLinear(config.query_size, config.hidden_size, mesh, heads="query")
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, mesh) if config.qk_norm else nn.Identity() for _ in "qk"
        )

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self._collectives, self._reduce_dtype)
        batch, length, _ = x_BSD.shape
        heads = (batch, length, -1, self.head_dim)
        q_BHSN = self.q_norm(self.q_proj(x_BSD).view(heads)).transpose(1, 2)
        k_BKSN = self.k_norm(self.k_proj(x_BSD).view(heads)).transpose(1, 2)
        v_BKSN = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        q_BHSN, k_BKSN = _rotate(q_BHSN, cos, sin), _rotate(k_BKSN, cos, sin)
        mixed_BHSN = self._collectives.attend(q_BHSN, k_BKSN, v_BKSN, mask_B1SS)
        mixed_BSD = self.o_proj(mixed_BHSN.transpose(1, 2).reshape(batch, length, -1))
        return reduce_scatter_sequence(mixed_BSD, self._collectives, self._reduce_dtype)


class _FeedForward(nn.Module):
    def __init__(self, config: Model, collectives: Collectives, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        self._collectives, self._reduce_dtype, mesh = collectives, reduce_dtype, collectives.mesh
        self.gate_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, mesh)
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, mesh)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, mesh)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self._collectives, self._reduce_dtype)
        out_BSD = self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return reduce_scatter_sequence(out_BSD, self._collectives, self._reduce_dtype)


def block_causal_mask(positions_BS: Tensor, indices_S: Tensor) -> Tensor:
    """Return the attention mask bool [B, S, S]: a token (row) attends to itself and to earlier tokens of its document.

    `positions_BS` are the tokens' distances from the starts of their documents, and `indices_S` is 0 to S - 1.
    """
    starts_BS = indices_S - positions_BS
    return (indices_S >= starts_BS[..., None]) & (indices_S <= indices_S[:, None])


def rotary_table(config: Model, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [S, N] of the rotary position embedding (arXiv 2104.09864), with halves duplicated.

    They are computed on the host: arithmetic on the meta device would import Dynamo, which takes 2 s.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling:
        frequencies = _scale_frequencies(frequencies, config.rope_scaling)
    angles = torch.arange(sequence_length, device="cpu")[:, None].float() * frequencies
    angles_SN = torch.cat((angles, angles), dim=-1)
    return angles_SN.cos(), angles_SN.sin()


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between (transformers, rope type llama3)."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    smooth = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelengths < shortest) * ~(wavelengths > longest)
    return torch.where(is_between, between, scaled)


def _rotate(x_BHSN: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x_BHSN.shape[-1] // 2
    # This product comes before the halves, as in transformers: the gradient of x then has the memory layout that it has
    # there, which decides the order in which the gradient of QK norm's weight is summed.
    straight = x_BHSN * cos
    swapped = torch.cat((-x_BHSN[..., half:], x_BHSN[..., :half]), dim=-1)
    return straight + swapped * sin
