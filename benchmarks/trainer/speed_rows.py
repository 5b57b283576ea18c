"""Rows that measure a trainer's step on the workbench's model: functions from a step's number to its loss.

Only the rows of a peer import its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trainer.workbench import Workbench
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.micro_batch import MicroBatch
from services.common.program.step import Program

Step = Callable[[int], float]


def ours_eager(bench: Workbench) -> Step:
    return _ours(bench, is_compiled=False)


def ours_compiled(bench: Workbench) -> Step:
    return _ours(bench, is_compiled=True)


def hugging_face_eager(bench: Workbench) -> Step:
    """Return the step of a plain loop around transformers' model: autocast, fused AdamW, clipping."""
    model = hugging_face_model(bench)
    return _plain_loop(bench, model, lambda tokens_BS: hugging_face_loss(model, tokens_BS))


def hugging_face_compiled(bench: Workbench) -> Step:
    model = hugging_face_model(bench)
    compiled = torch.compile(model, dynamic=False)
    return _plain_loop(bench, model, lambda tokens_BS: hugging_face_loss(compiled, tokens_BS))


def litgpt_eager(bench: Workbench) -> Step:
    """Return the step of a plain loop around LitGPT's model and chunked loss, as in its `pretrain`."""
    return _litgpt(bench, is_compiled=False)


def litgpt_compiled(bench: Workbench) -> Step:
    return _litgpt(bench, is_compiled=True)


def _ours(bench: Workbench, *, is_compiled: bool) -> Step:
    recipe = bench.recipe(is_compiled=is_compiled)
    mesh, device = Mesh(0, data_parallel_size=1), recipe.parallel.device
    backend = TorchNative(mesh, bench.threads, recipe.train.reduction, device)
    program = Program(recipe, backend)
    write_weights(program, bench)

    def run(step: int) -> float:
        micro_batches = map(MicroBatch, bench.tokens(step).chunk(bench.num_micro_batches))
        return backend.read(program.train_step(step, micro_batches)._asdict())["loss"]

    return run


def write_weights(program: Program, bench: Workbench) -> None:
    """Write the initial weights into a program that does not split the model."""
    weights = bench.read_weights()
    with program.state.writing() as held:
        for piece, tensor in held.items():
            if piece.kind == "weight":
                tensor.copy_(weights[piece.name].flatten()[piece.start : piece.stop])


def hugging_face_model(bench: Workbench) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    with torch.device(bench.device):
        model = LlamaForCausalLM(LlamaConfig(**bench.hugging_face_config()))
    model.load_state_dict(bench.read_weights())
    return model


def hugging_face_loss(model: Any, tokens_BS: Tensor) -> Tensor:
    inputs_BS, targets_BS = tokens_BS[:, :-1], tokens_BS[:, 1:].contiguous()
    loss: Tensor = model(input_ids=inputs_BS, labels=inputs_BS, shift_labels=targets_BS).loss
    return loss


def _litgpt(bench: Workbench, *, is_compiled: bool) -> Step:
    from litgpt.config import Config  # type: ignore[import-not-found] # noqa: PLC0415
    from litgpt.model import GPT  # type: ignore[import-not-found] # noqa: PLC0415
    from litgpt.scripts.convert_hf_checkpoint import (  # type: ignore[import-not-found] # noqa: PLC0415
        copy_weights_hf_llama,
    )
    from litgpt.utils import chunked_cross_entropy  # type: ignore[import-not-found] # noqa: PLC0415

    recipe = bench.recipe()
    config = Config(
        name="benchmark",
        block_size=recipe.corpus.sequence_length,
        vocab_size=recipe.model.vocab_size,
        padded_vocab_size=recipe.model.vocab_size,
        n_layer=recipe.model.num_hidden_layers,
        n_head=recipe.model.num_attention_heads,
        n_query_groups=recipe.model.num_key_value_heads,
        n_embd=recipe.model.hidden_size,
        intermediate_size=recipe.model.intermediate_size,
        norm_eps=recipe.model.rms_norm_eps,
        rope_base=int(recipe.model.rope_theta),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    with torch.device(bench.device):
        model, weights = GPT(config), dict[str, Tensor]()
    copy_weights_hf_llama(config, {}, weights, bench.read_weights())
    model.load_state_dict(weights)
    called = torch.compile(model, dynamic=False) if is_compiled else model

    def loss_of(tokens_BS: Tensor) -> Tensor:
        loss: Tensor = chunked_cross_entropy(called(tokens_BS[:, :-1]), tokens_BS[:, 1:].contiguous())
        return loss

    return _plain_loop(bench, model, loss_of)


def _plain_loop(bench: Workbench, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Step:
    settings = bench.recipe().optimizer
    groups = _groups_by_decay(model.parameters(), settings.weight_decay)
    betas = (settings.beta1, settings.beta2)
    rate, device, count = settings.min_learning_rate, bench.device, bench.num_micro_batches
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=settings.epsilon, fused=True)

    def run(step: int) -> float:
        total = torch.zeros((), device=device)
        for tokens_BS in bench.tokens(step).to(device).chunk(count):
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(tokens_BS) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return run


def _groups_by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    all_ = list(parameters)
    return [
        {"params": [each for each in all_ if each.ndim > 1], "weight_decay": weight_decay},
        {"params": [each for each in all_ if each.ndim == 1], "weight_decay": 0.0},
    ]
