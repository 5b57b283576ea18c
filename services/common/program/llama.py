"""Llama, with Hugging Face's parameter names, so that a checkpoint needs no converter.

In eager float32, logits and every gradient are bit-equal to transformers' `LlamaForCausalLM` with SDPA
attention; the order of the operations below is part of that promise.

Shape suffixes: B sequences, S positions, D hidden size, H query heads, K key-value heads, N head dimension,
F intermediate size, V vocabulary, T = B * S tokens, and t workers of the tensor axis (see `layers`). The cosines and
sines of rotary positions are [S, N], or [B, 1, S, N] where sequences have documents of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.program.activation_checkpointing import run_checkpointed
from services.common.program.backends.protocol import Collectives
from services.common.program.layers import (
    ColumnParallelLinear,
    Linear,
    OneWorker,
    RMSNorm,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    gather_sequence,
    reduce_scatter_sequence,
)
from services.common.program.sharding import Sharding
from services.common.recipe import ActivationCheckpointing, Model, RopeScaling


class Llama(nn.Module):
    """One worker's part of the model; all of it without other workers.

    `forward` stops before the language-model head: the loss applies it in chunks (see `loss`).
    """

    def __init__(
        self,
        config: Model,
        sequence_length: int,
        collectives: Collectives | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`reduce_dtype` is what activations and their gradients are summed in over the workers that share the model,
        unless theirs is wider."""
        super().__init__()
        self.collectives = collectives or OneWorker()
        self.model = _Decoder(config, sequence_length, self.collectives, activation_checkpointing, reduce_dtype)
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, self.collectives.mesh)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Final hidden states [B, S / t, D] of this worker's slice of the sequence, normalised.

        With `positions_BS`, each token's distance from the begin of its document, attention stays within documents, and
        rotary positions are these. Without them a sequence is one document.
        """
        hidden_BSD: Tensor = self.model(tokens_BS, positions_BS)
        return hidden_BSD

    def logits(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of the token that follows each position. Of a model on one worker."""
        assert self.collectives.mesh.tensor_parallel_size == 1
        logits_BSV: Tensor = self.lm_head(self(tokens_BS, positions_BS))
        return logits_BSV

    def weights_of_products(self) -> set[str]:
        """Names of the parameters that are only ever multiplied with: autocast rounds them at each use."""
        linear = [name for name, module in self.named_modules() if isinstance(module, Linear)]
        return {f"{name}.weight" for name in linear} & {name for name, _ in self.named_parameters()}

    def shardings(self) -> dict[str, Sharding]:
        """Which part of each parameter is here, by its name."""
        return {name: self.get_submodule(name.rpartition(".")[0]).sharding for name, _ in self.named_parameters()}  # type: ignore[misc]


def parameter_shapes(config: Model) -> dict[str, torch.Size]:
    """Shapes of the full parameters, by name."""
    with torch.device("meta"):
        model = Llama(config, sequence_length=1)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def initialize(model: Llama, config: Model, seed: int, place: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
    """Draw every weight from a normal distribution, each from a stream of its own keyed by (seed, name).

    A weight does not depend on the order of creation, on the other weights or on the workers. Projections into the
    residual stream are scaled by 1 / sqrt(2 * layers), so that its variance does not grow with depth (GPT-2).

    Weights are drawn on the host; `place` brings one to the model's device.
    """
    residual_scale = 1.0 / math.sqrt(2 * config.num_hidden_layers)
    shardings = model.shardings()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(place(torch.ones(parameter.shape)))
                continue
            key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            full = torch.empty(shardings[name].full_shape(parameter.shape))
            full.normal_(0.0, config.initializer_range * scale, generator=generator)
            parameter.copy_(place(shardings[name].take(full)))


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
        self.embed_tokens = VocabularyParallelEmbedding(config.vocab_size, config.hidden_size, collectives)
        self.layers = nn.ModuleList(_Layer(config, collectives, reduce_dtype) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, collectives.mesh)
        device = self.embed_tokens.weight.device
        cos_SN, sin_SN = (table_SN.to(device) for table_SN in rotary_table(config, sequence_length))
        self.register_buffer("cos_SN", cos_SN, persistent=False)
        self.register_buffer("sin_SN", sin_SN, persistent=False)
        indices_S = torch.arange(sequence_length, dtype=torch.int32, device="cpu").to(device)
        self.register_buffer("indices_S", indices_S, persistent=False)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        length, mode = tokens_BS.shape[1], self._activation_checkpointing
        rows_BSD = self.embed_tokens(tokens_BS)
        # One worker has a token's row, and the others zeros: the sum is exact in the rows' own type.
        hidden_BSD = reduce_scatter_sequence(rows_BSD, self._collectives, rows_BSD.dtype)
        cos, sin = self.cos_SN[:length], self.sin_SN[:length]  # type: ignore[index]
        mask_B1SS = None
        if positions_BS is not None:
            cos, sin = cos[positions_BS][:, None], sin[positions_BS][:, None]
            mask_B1SS = block_causal_mask(positions_BS, self.indices_S[:length])[:, None]  # type: ignore[index]
        for layer in self.layers:
            hidden_BSD = run_checkpointed(layer, mode, self._collectives, hidden_BSD, cos, sin, mask_B1SS)
        normed_BSD: Tensor = self.norm(hidden_BSD)
        return normed_BSD


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
    """Each worker has some query heads, and the key-value heads that these look at."""

    def __init__(self, config: Model, collectives: Collectives, reduce_dtype: torch.dtype) -> None:
        super().__init__()
        self._collectives, self._reduce_dtype, mesh = collectives, reduce_dtype, collectives.mesh
        self.head_dim = config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, config.hidden_size, mesh, heads="query")
        self.k_proj = ColumnParallelLinear(config.hidden_size, key_value_size, mesh, heads="key_value")
        self.v_proj = ColumnParallelLinear(config.hidden_size, key_value_size, mesh, heads="key_value")
        self.o_proj = RowParallelLinear(config.hidden_size, config.hidden_size, mesh, heads="query")

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self._collectives, self._reduce_dtype)
        batch, length, _ = x_BSD.shape
        heads = (batch, length, -1, self.head_dim)
        q_BHSN = self.q_proj(x_BSD).view(heads).transpose(1, 2)
        k_BKSN = self.k_proj(x_BSD).view(heads).transpose(1, 2)
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
    """bool [B, S, S]: a token (row) attends to itself and to those before it in its document.

    `positions_BS` are distances from the begins of documents, `indices_S` 0 to S - 1.
    """
    begins_BS = indices_S - positions_BS
    return (indices_S >= begins_BS[..., None]) & (indices_S <= indices_S[:, None])


def rotary_table(config: Model, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, N] of the rotary position embedding (arXiv 2104.09864), halves duplicated; on the host.

    Arithmetic on the meta device would import Dynamo, which takes 2 s.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling:
        frequencies = _scale_frequencies(frequencies, config.rope_scaling)
    angles = torch.arange(sequence_length, device="cpu")[:, None].float() * frequencies
    angles_SN = torch.cat((angles, angles), dim=-1)
    return angles_SN.cos(), angles_SN.sin()


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down long waves by `factor`, keep short ones, and interpolate between (transformers, rope type llama3)."""
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
    swapped = torch.cat((-x_BHSN[..., half:], x_BHSN[..., :half]), dim=-1)
    return x_BHSN * cos + swapped * sin
