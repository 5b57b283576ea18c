"""A step is one graph: code that would break it is an error with its place, and no slower step."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.common.errors import DeviceError
from services.common.program.backends.whole_graph import compile_whole


def choose_by_value(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 3 * choose_by_value(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 3 * gradient


def call_a_class(x: Tensor) -> Tensor:
    tripled: Tensor = Tripled.apply(x)  # type: ignore[no-untyped-call]
    return tripled


@pytest.mark.parametrize(
    ("function", "culprit"),
    [(choose_by_value, choose_by_value), (call_a_class, choose_by_value)],
)
def test_a_graph_that_breaks_is_an_error_with_its_place(
    function: Callable[[Tensor], Tensor], culprit: Callable[[Tensor], Tensor]
) -> None:
    compiled = compile_whole(function, backend="eager")
    with pytest.raises(DeviceError) as raised:
        compiled(torch.ones(3, requires_grad=True))
    message = str(raised.value)
    assert raised.value.exit_code == 4
    assert f"{__file__}:{inspect.getsourcelines(culprit)[1] + 1}: " in message
    assert function.__name__ in message
    assert "--compile.enabled=false" in message
