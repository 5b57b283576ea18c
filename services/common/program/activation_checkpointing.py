"""Activation checkpointing: the backward pass recomputes activations that the forward pass did not keep.

The method is that of arXiv 1604.06174; `selective` follows arXiv 2205.05198, section 5, with the operations in KEPT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from services.common.recipe.training import ActivationCheckpointing

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,  # that of a device from another package
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}
"""Slow operations, whose results `selective` keeps. Norms, rotations and activation functions are recomputed."""


class Fence(Protocol):
    """A function that puts an optimization barrier between tensors and the code that made them."""

    def __call__(self, *tensors: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        """Return copies of the tensors from which the compiler computes nothing before `after` is computed, and whose
        results it does not merge with results of the originals. Where `after` is NaN, so are the copies.
        """
        ...


def run_checkpointed(
    layer: nn.Module, mode: ActivationCheckpointing, *arguments: Tensor | None, fence: Fence | None = None
) -> Tensor:
    """Return `layer(*arguments)`, keeping for the backward pass what `train.activation_checkpointing` says.

    A compiler that sees the forward and the backward pass as one graph needs a `fence`: it would merge what is
    recomputed with what was computed, and so keep all activations.
    """
    if mode == "none":
        return layer(*arguments)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if fence is None:
        if mode == "selective":  # written out here, because Dynamo refuses a function that a variable holds
            options["context_fn"] = partial(create_selective_checkpoint_contexts, choose_policy)
        return checkpoint(layer, *arguments, **options)
    call = _FencedCall(layer, fence)
    if mode == "selective":
        options["context_fn"] = call.make_contexts
    result: Tensor = checkpoint(call, *arguments, **options)
    if result.requires_grad:
        result.register_hook(call.start_backward)
    return result


def choose_policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Return whether `selective` keeps the result of an operation, in the form that torch asks for."""
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _FencedCall:
    """A layer's call in the forward pass, which the backward pass repeats from fenced copies of its inputs.

    The inputs are fenced with the gradient of the layer's result: no layer is recomputed before that is there, so the
    recomputed activations of one layer at a time take memory.
    """

    def __init__(self, layer: nn.Module, fence: Fence) -> None:
        self._layer, self._fence_after = layer, fence
        self._has_run = False
        self._gradient_BSD: Tensor | None = None

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        if not self._has_run:
            self._has_run = True
            return self._layer(*arguments)
        fenced = iter(self.fence(*(each for each in arguments if each is not None)))
        try:
            return self._layer(*(None if each is None else next(fenced) for each in arguments))
        finally:  # autograd ends this call by an exception once it has what it needs
            self._gradient_BSD = None  # a tensor that is alive at the end of a graph is one of its outputs

    def start_backward(self, gradient_BSD: Tensor) -> None:
        """Remember the gradient of the layer's result, which the recomputation has to wait for."""
        self._gradient_BSD = gradient_BSD.detach()

    def fence(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Fence tensors with the gradient of the layer's result."""
        assert self._gradient_BSD is not None
        return self._fence_after(*tensors, after=self._gradient_BSD)

    def make_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward and of the backward pass; the latter fences the results that were kept."""
        keeping, kept = create_selective_checkpoint_contexts(choose_policy)

        @contextmanager
        def recompute() -> Iterator[None]:
            with kept, _FenceKept(self):
                yield

        return keeping, recompute()


class _FenceKept(TorchDispatchMode):
    """Dispatches before the mode that returns results which the forward pass kept, and fences those."""

    def __init__(self, call: _FencedCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, lambda each: self._call.fence(each)[0], out) if func in KEPT else out
