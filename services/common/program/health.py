"""Measures the health of a model: norms of layer groups, its largest logit, and its activations.

Shape suffixes: B sequences, S positions, D hidden size, T tokens, V vocabulary, K buckets,
R model replicas, t ranks of the tensor axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.program.backends.backend import Collectives
from services.common.program.buckets import Bucket
from services.common.program.layers import cut_padding, gather_sequence, mask_padding

MAX_LAYER_GROUPS = 4


class Health(NamedTuple):
    """Health of a model after a step. The numbers are the same on all workers."""

    gradient_norms: dict[str, float]
    """Norm of the step's gradient before clipping, by layer group; empty where the step was not applied."""
    update_ratios: dict[str, float]
    """Norm of the step's update over the norm of the weights before it, by layer group."""
    largest_logit: float
    activation_rms: float
    """Root mean square of the activations after the last layer, which the final norm has not seen."""

    @classmethod
    def of(cls, squares_3K: Tensor | None, groups: Sequence[str], divisor: int, numbers_R2: Sequence[Tensor]) -> Self:
        """Make the health from numbers on the host.

        `squares_3K` is from `AdamW.measure_squares`, None where the step was not applied, with the group of each bucket
        and the gradient's divisor. `numbers_R2` are from `measure_activations`, for R replicas. Their sums are exact,
        so the numbers do not depend on how replicas share the micro-batches.
        """
        gradients, ratios = dict[str, float](), dict[str, float]()
        kinds = squares_3K.tolist() if squares_3K is not None else []
        for group in dict.fromkeys(groups) if kinds else ():
            gradient, update, weight = (
                math.fsum(square for square, each in zip(kind, groups, strict=True) if each == group) for kind in kinds
            )
            gradients[group] = math.sqrt(gradient) / divisor
            if weight:
                ratios[group] = math.sqrt(update / weight)
        all_numbers = torch.cat(list(numbers_R2))
        squares, largest = all_numbers[:, 0].tolist(), float(all_numbers[:, 1].max())  # NaN where a logit is NaN
        return cls(gradients, ratios, largest, math.sqrt(math.fsum(squares) / len(squares)))


_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def name_groups(buckets: Sequence[Bucket], num_layers: int) -> list[str]:
    """Return the layer group of each bucket.

    The groups are `embedding`, the matrices of at most MAX_LAYER_GROUPS runs of layers, such as `layers 00-07`, then
    `head`, and `norms` for the vectors of all layers. A head that is the embedding belongs to `embedding`.
    """
    return [_name_group(next(iter(bucket.parameters)), bucket.is_decayed, num_layers) for bucket in buckets]


def _name_group(parameter: str, is_matrix: bool, num_layers: int) -> str:
    if not is_matrix:
        return "norms"
    layer = _LAYER_NUMBER.search(parameter)
    if not layer:
        return "head" if parameter.startswith("lm_head.") else "embedding"
    num_groups = min(MAX_LAYER_GROUPS, num_layers)
    group = int(layer[1]) * num_groups // num_layers
    first, end = (-(-each * num_layers // num_groups) for each in (group, group + 1))
    width = len(str(num_layers - 1))
    return f"layers {first:0{width}}-{end - 1:0{width}}"


def measure_activations(
    residual_BSD: Tensor,
    hidden_BSD: Tensor,
    lm_head_VD: Tensor,
    chunk_tokens: int,
    collectives: Collectives,
    reduce_dtype: torch.dtype,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the mean square of a micro-batch's activations after the last layer, and its largest logit, as [1, 2].

    `residual_BSD` are these activations, before the final norm, and `hidden_BSD` after it; both are this rank's slice
    of the sequence. All ranks of the tensor axis return the same numbers. Logits are computed in chunks of
    `chunk_tokens` tokens, as in the loss; rows of padding, from `vocab_size` on, have none.
    """
    tensor_parallel_size = collectives.mesh.tensor_parallel_size
    square_1 = residual_BSD.float().square().mean().reshape(1)
    square_1 = collectives.all_reduce(square_1, "tensor") / tensor_parallel_size
    hidden_TD = gather_sequence(hidden_BSD, collectives, reduce_dtype).flatten(0, 1)
    lm_head_VD = cut_padding(lm_head_VD, vocab_size, collectives)
    # `amax` without dimensions reduces nothing in torch_xla 2.9.
    largest = [
        mask_padding(F.linear(each_TD, lm_head_VD), vocab_size, collectives).max().float()
        for each_TD in hidden_TD.split(chunk_tokens)
    ]
    largest_1 = torch.stack(largest).amax(0, keepdim=True)
    return torch.stack([square_1, collectives.all_reduce(largest_1, "tensor", "max")], dim=1)
