"""Compiles functions as one graph each, and names the place where a function cannot be one.

A function whose graph breaks off would go on operation by operation, which is slow and which nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary
from typing import Any, TypeVar

import torch
import torch._dynamo.exc

from services.common.errors import DeviceError
from services.common.program.backends.warm_cache import name_of

R = TypeVar("R")

_TORCH = Path(torch.__file__).parent
_REFUSALS = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
"""Errors by which Dynamo says that code is not part of a graph."""


def compile_whole(function: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Compile a function as one graph by `torch.compile` with these options.

    Its first call for new shapes raises `DeviceError` where the graph breaks.
    """
    compiled = torch.compile(function, fullgraph=True, **options)

    def call(*arguments: Any) -> R:
        try:
            return compiled(*arguments)
        except _REFUSALS as error:
            raise _graph_break(name_of(function), error) from error

    return call


def _graph_break(name: str, error: Any) -> DeviceError:
    frames: list[FrameSummary] = list(getattr(error, "real_stack", None) or ())
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else "a place that torch does not tell"
    reason = ". ".join(line.strip() for line in str(error.msg).splitlines()[:2])
    return DeviceError(
        f"{place}: the graph of {name} breaks here, and a compiled step has to be one graph. Torch's reason: {reason} "
        f"Change this code, or run without compiled graphs: --compile.enabled=false"
    )
