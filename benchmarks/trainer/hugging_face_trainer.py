"""Runs transformers' Trainer with its own loop, and takes the times of steps from its callbacks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainer.speed_rows import hugging_face_model
from benchmarks.trainer.workbench import Workbench


class Batches(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __init__(self, bench: Workbench) -> None:
        self._bench = bench

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self._bench.num_steps):
            for row_S in self._bench.tokens(step):
                # The Trainer's loss shifts labels by one and ignores the last input, so rows have one more token.
                yield {"input_ids": row_S, "labels": row_S}


def run_trainer(bench: Workbench) -> tuple[list[float], list[float]]:
    """Return the seconds and the losses of all steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415

    settings = bench.recipe().optimizer
    seconds: list[float] = []
    losses: list[float] = []

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self._before = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            seconds.append(now - self._before)
            self._before = now

        def on_log(self, *_: Any, **given: Any) -> None:
            if "loss" in (logs := given["logs"]):
                losses.append(float(logs["loss"]))

    arguments = TrainingArguments(
        output_dir=str(bench.folder / "hugging-face-trainer"),
        use_cpu=bench.device == "cpu",
        bf16=True,
        per_device_train_batch_size=bench.recipe().batch.micro_batch_size,
        gradient_accumulation_steps=bench.num_micro_batches,
        max_steps=bench.num_steps,
        learning_rate=settings.min_learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(hugging_face_model(bench), arguments, train_dataset=Batches(bench), callbacks=[Watch()])
    trainer.train()
    return seconds, losses
