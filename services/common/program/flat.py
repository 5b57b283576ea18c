"""All parameters of a model in one flat float32 tensor, so that reduction, clipping and AdamW are single loops."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class FlatParameters:
    """Moves a model's parameters into one tensor [P]; the model goes on to use them as views.

    Matrices come first and vectors (norm weights) last, so that what weight decay applies to is a prefix.
    """

    def __init__(self, model: nn.Module) -> None:
        named = sorted(model.named_parameters(), key=lambda item: item[1].ndim == 1)  # stable: keeps the order within
        self.parameters = [parameter for _, parameter in named]
        self.shapes = {name: parameter.shape for name, parameter in named}
        self.num_decayed = sum(parameter.numel() for parameter in self.parameters if parameter.ndim > 1)
        self.weights_P = torch.cat([parameter.detach().float().flatten() for parameter in self.parameters])
        for parameter, view in zip(self.parameters, self.views(self.weights_P).values(), strict=True):
            parameter.data = view

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor under their parameter names, in their parameters' shapes, sharing its memory."""
        pieces = flat_P.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def flatten(self, tensors: Iterable[Tensor], extra: Tensor) -> Tensor:
        """One tensor [P + 1] from a tensor per parameter, in `parameters` order, and one further scalar."""
        return torch.cat([*(tensor.flatten() for tensor in tensors), extra.reshape(1)])
