"""Builders: a recipe that all stages finish in seconds, and the text that it reads."""

from __future__ import annotations

from pathlib import Path

RECIPE = """
name = "small"
[corpus]
name = "notes"
sequence_length = 32
rows_per_shard = 64
validation_fraction = 0.1
sources = [{ uri = "%s" }]
[tokenizer]
num_workers = 2
[tokenizer.train]
vocab_size = 320
[model]
vocab_size = 320
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[parallel]
data_parallel_size = 2
[batch]
micro_batch_size = 4
global_batch_size = 64
[optimizer]
learning_rate = 1e-2
min_learning_rate = 1e-3
warmup_steps = 2
decay_steps = 60
[train]
max_steps = 60
evaluation_interval_steps = 15
[checkpoint]
interval_steps = 25
"""


def write_small_recipe(path: Path, text: str) -> Path:
    """A recipe over the folder of text files `text`, as the stages will see it."""
    path.write_text(RECIPE % text, encoding="utf-8")
    return path


def write_notes(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(60):
        lines = [f"Note {number}: entry {n} follows entry {n - 1} of the list." for n in range(1, 30)]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
