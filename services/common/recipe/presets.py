"""What is shipped: recipes, and the published sizes of Llama, TinyLlama (arXiv 2401.02385) and Qwen3 (arXiv
2505.09388), as the recipe's `[model]` section has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parents[3] / "recipes"


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, is_tied: bool) -> dict[str, Any]:
    return _sizes(151_669, hidden, intermediate, layers, heads, 8) | {
        "padded_vocab_size": 151_936,
        "head_dim": 128,
        "qk_norm": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": is_tied,
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
    "llama3-70b": _sizes(128_256, 8_192, 28_672, 80, 64, 8) | {"rope_theta": 500_000.0},
    "llama3.1-8b": _LLAMA3_8B | {"rope_scaling": _LLAMA31_SCALING},
    "tinyllama-1.1b": _sizes(32_000, 2_048, 5_632, 22, 32, 4),
    "qwen3-0.6b": _qwen3(1_024, 3_072, 28, 16, is_tied=True),
    "qwen3-1.7b": _qwen3(2_048, 6_144, 28, 16, is_tied=True),
    "qwen3-4b": _qwen3(2_560, 9_728, 36, 32, is_tied=True),
    "qwen3-8b": _qwen3(4_096, 12_288, 36, 32, is_tied=False),
}
