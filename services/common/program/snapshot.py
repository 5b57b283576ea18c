"""Copies of a program's state on the host, for checkpoints. A GPU makes them while it computes the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.common.program.state import StateSlice


class Snapshots:
    """Memory on the host for one copy of the state at a time.

    The memory is kept for the next copy, because mapping new pages takes longer than writing to them.
    """

    _is_pinned = False

    def __init__(self) -> None:
        self._memory: dict[StateSlice, Tensor] = {}

    def start(self, state: Mapping[StateSlice, Tensor]) -> Callable[[], dict[StateSlice, Tensor]]:
        """Start to copy the state, and return a function that waits for the copy and returns it, in any thread.

        The copy lasts until the next `start`, before which the caller has to wait for this copy.
        """
        copy = self._memory_for(state)
        for piece, tensor in state.items():
            copy[piece].copy_(tensor)
        return lambda: copy

    def hold_updates(self) -> None:
        """Let later work of the device change the state only after the copy is made. The host does not wait."""

    def _memory_for(self, state: Mapping[StateSlice, Tensor]) -> dict[StateSlice, Tensor]:
        for piece in state.keys() - self._memory.keys():
            self._memory[piece] = torch.empty(state[piece].shape, pin_memory=self._is_pinned)
        return {piece: self._memory[piece] for piece in state}


class CudaSnapshots(Snapshots):
    """Snapshots that a GPU copies to pinned memory on a stream of its own.

    The copies run beside the kernels of the next step's forward and backward passes, which read the state and do not
    write it.
    """

    _is_pinned = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, state: Mapping[StateSlice, Tensor]) -> Callable[[], dict[StateSlice, Tensor]]:
        copy = self._memory_for(state)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for piece, tensor in state.items():
                copy[piece].copy_(tensor, non_blocking=True)
        copied = self._stream.record_event()

        def wait() -> dict[StateSlice, Tensor]:
            copied.synchronize()
            return copy

        return wait

    def hold_updates(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
