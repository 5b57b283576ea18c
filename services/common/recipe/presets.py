"""The published sizes of Llama and TinyLlama (arXiv 2401.02385), as the recipe's `[model]` section has them."""

from __future__ import annotations

from typing import Any


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


_LLAMA3_8B = _sizes(128_256, 4_096, 14_336, 32, 32, 8) | {"rope_theta": 500_000.0}
_LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _sizes(32_000, 4_096, 11_008, 32, 32, 32),
    "llama2-13b": _sizes(32_000, 5_120, 13_824, 40, 40, 40),
    "llama3-8b": _LLAMA3_8B,
    "llama3.1-8b": _LLAMA3_8B | {"rope_scaling": _LLAMA31_SCALING},
    "tinyllama-1.1b": _sizes(32_000, 2_048, 5_632, 22, 32, 4),
}
