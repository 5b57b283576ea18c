"""Builders of a recipe that all stages finish in seconds, and of its text."""

from __future__ import annotations

from pathlib import Path

from services.common.testing.recipes import recipe_text


def write_small_recipe(path: Path, text: str) -> Path:
    """Write a recipe over the folder of text files `text`, a path as the stages see it."""
    recipe = recipe_text(
        corpus__name="notes",
        corpus__sequence_length=32,
        corpus__rows_per_shard=64,
        corpus__validation_fraction=0.1,
        corpus__sources=[{"uri": text}],
        tokenizer__num_workers=2,
        tokenizer__train__vocab_size=320,
        model__vocab_size=320,
        model__hidden_size=32,
        model__intermediate_size=64,
        model__num_hidden_layers=1,
        model__num_key_value_heads=2,
        parallel__data_parallel_size=2,
        batch__micro_batch_size=4,
        batch__global_batch_size=64,
        optimizer__decay_steps=60,
        train__max_steps=60,
        train__evaluation_interval_steps=15,
        checkpoint__interval_steps=25,
    )
    path.write_text(recipe, encoding="utf-8")
    return path


def write_notes(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(60):
        lines = [f"Note {number}: entry {n} follows entry {n - 1} of the list." for n in range(1, 30)]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
