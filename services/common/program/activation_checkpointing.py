"""Activation checkpointing: the backward pass computes again what the forward pass did not keep (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from services.common.program.backends.protocol import Collectives
from services.common.recipe import ActivationCheckpointing

# What takes long, and is kept under `selective`; norms, rotations and activation functions are computed again.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def run_checkpointed(
    layer: nn.Module, mode: ActivationCheckpointing, collectives: Collectives, *arguments: Tensor | None
) -> Tensor:
    """`layer(*arguments)`, which keeps for the backward pass what `train.activation_checkpointing` says.

    On a lazy device one compiler sees both passes, and would merge what is computed again with what was computed: there
    the recomputation is fenced.
    """
    if mode == "none":
        kept: Tensor = layer(*arguments)
        return kept
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if collectives.is_lazy:
        call = _FencedCall(layer, collectives)
        if mode == "selective":
            options["context_fn"] = call.make_contexts
        result: Tensor = checkpoint(call, *arguments, **options)
        if result.requires_grad:
            result.register_hook(call.begin_backward)
        return result
    if mode == "selective":  # written here, where Dynamo sees what it is: it refuses a function that a variable holds
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose)
    recomputed: Tensor = checkpoint(layer, *arguments, **options)
    return recomputed


class _FencedCall:
    """A layer of one forward pass. Called again, by the backward pass, it computes from fenced copies of its inputs.

    They are fenced together with the gradient of the layer's result: nothing is computed again before that is there,
    so that of all layers one at a time takes memory for it.
    """

    def __init__(self, layer: nn.Module, collectives: Collectives) -> None:
        self._layer, self._collectives = layer, collectives
        self._has_run = False
        self._gradient_BSD: Tensor | None = None

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        if not self._has_run:
            self._has_run = True
            result: Tensor = self._layer(*arguments)
            return result
        fenced = iter(self.fence(*(each for each in arguments if each is not None)))
        try:
            again: Tensor = self._layer(*(None if each is None else next(fenced) for each in arguments))
        finally:  # autograd ends this call by an exception once it has what it needs
            self._gradient_BSD = None  # a tensor that is alive at the end of a graph is one of its outputs
        return again

    def begin_backward(self, gradient_BSD: Tensor) -> None:
        self._gradient_BSD = gradient_BSD.detach()

    def fence(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self._gradient_BSD is not None
        return self._collectives.fence(*tensors, after=self._gradient_BSD)

    def make_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of the forward and of the backward pass; in the latter what was kept is fenced as inputs are."""
        keeping, kept = create_selective_checkpoint_contexts(_choose)

        @contextmanager
        def recompute() -> Iterator[None]:
            with kept, _FenceKept(self):
                yield

        return keeping, recompute()


class _FenceKept(TorchDispatchMode):
    """Stands before the mode that gives back what the forward pass kept."""

    def __init__(self, call: _FencedCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, lambda each: self._call.fence(each)[0], out) if func in KEPT else out


def _choose(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
