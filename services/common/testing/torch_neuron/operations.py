"""The operations that the program calls on the device outside of graphs, each of which TorchNeuron is known to run.

A public copy of TorchNeuron's source from before its beta has them, besides the views. Any other operation might be
computed on the host. Before you add one, look it up in TorchNeuron's documentation, or call
`torch_neuronx.get_fallback_ops()` on a device.
"""

from __future__ import annotations

_NAMES = """
    _log_softmax _log_softmax_backward_data _reshape_alias _softmax _softmax_backward_data abs add all amax arange
    bitwise_and bmm cat clamp div embedding_dense_backward empty empty_strided eq exp fill_ ge index index_select
    isfinite isneginf le linalg_vector_norm log logical_not lt masked_fill_ max mean min mm mul ne neg
    nll_loss_backward nll_loss_forward pow reciprocal rsqrt sigmoid silu sqrt sub sum view where zero_
"""

KNOWN = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Names of the operations without their overloads."""
