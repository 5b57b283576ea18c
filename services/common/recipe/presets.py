"""The published Llama sizes and TinyLlama's (arXiv 2401.02385), by name, as the recipe's `[model]` section has them."""

from __future__ import annotations

from typing import Any

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "vocab_size": 32_000,
        "hidden_size": 4_096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama2-13b": {
        "vocab_size": 32_000,
        "hidden_size": 5_120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama3-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
    },
    "llama3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8_192,
        },
    },
    "tinyllama-1.1b": {
        "vocab_size": 32_000,
        "hidden_size": 2_048,
        "intermediate_size": 5_632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
