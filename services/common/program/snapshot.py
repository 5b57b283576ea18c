"""Copies of a program's state on the host, for checkpoints: a GPU makes them while it goes on with the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from services.common.program.state import StateSlice


class Snapshots:
    """Memory on the host for one copy of the state at a time.

    A GPU copies from a stream of its own to pinned memory, beside the kernels of the next step's forward and backward
    passes, which read the state and do not write it. `hold` keeps the update that follows from running ahead of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._device = device
        self._memory: dict[StateSlice, Tensor] = {}

    def begin(self, state: Mapping[StateSlice, Tensor]) -> Callable[[], dict[StateSlice, Tensor]]:
        """Begin to copy the state, and return a function that returns the copy once it is there, in any thread.

        The copy lasts until the next one begins: the memory is kept, because the pages of a new one would take longer
        to map, and on a GPU to pin, than to write. The caller has waited for the copy before.
        """
        for piece in state.keys() - self._memory.keys():
            self._memory[piece] = torch.empty(state[piece].shape, pin_memory=self._is_on_gpu)
        copy = {piece: self._memory[piece] for piece in state}
        if not self._is_on_gpu:
            for piece, tensor in state.items():
                copy[piece].copy_(tensor)
            return lambda: copy
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for piece, tensor in state.items():
                copy[piece].copy_(tensor, non_blocking=True)
        copied = self._stream.record_event()

        def wait() -> dict[StateSlice, Tensor]:
            copied.synchronize()
            return copy

        return wait

    def hold(self) -> None:
        """Let the device change the state only after what was begun is copied. The host does not wait."""
        if self._is_on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)
