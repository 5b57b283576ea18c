"""Slices of a run's state, in coordinates that do not depend on the ranks which hold them.

A rank's tensor-parallel shard of a parameter is a box of the full tensor, and its ZeRO-1 shard of that is a run of the
box's elements in row-major order. So a slice is a run of a box, and a checkpoint of slices can be read by every other
number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, cast, get_args

import torch
from torch import Tensor

StateKind = Literal["weight", "exp_avg", "exp_avg_sq"]
"""Kind of a tensor of the state: the float32 master weights of a parameter, or one of AdamW's two moments of it."""

_KEY = re.compile(
    rf"(?P<kind>{'|'.join(get_args(StateKind))})/(?P<name>[\w.]+)"
    r"\[(?P<box>\d{1,18}:\d{1,18}(?:,\d{1,18}:\d{1,18})?)\](?:\.flat\[(?P<start>\d{1,18}):(?P<stop>\d{1,18})\])?"
)


@dataclass(frozen=True)
class StateSlice:
    """Elements `start` to `stop` of a box of a parameter's full tensor, which is a vector or a matrix."""

    kind: StateKind
    name: str
    """Hugging Face's name of the parameter."""
    box: tuple[tuple[int, int], ...]
    """Range of indices along each dimension of the full tensor: first index and end."""
    start: int
    stop: int

    @classmethod
    def whole(cls, kind: StateKind, name: str, shape: Iterable[int]) -> Self:
        """Make the slice of a whole tensor of this shape."""
        box = tuple((0, length) for length in shape)
        return cls(kind, name, box, 0, math.prod(stop for _, stop in box))

    @classmethod
    def parse(cls, key: str) -> Self:
        """Read a slice from its key. Raises `ValueError` where the text is not the key of a slice."""
        found = _KEY.fullmatch(key)
        if not found:
            raise ValueError(f"{key[:200]!r} is not the key of a slice, such as 'weight/model.norm.weight[0:16]'")
        sides = [side.split(":") for side in found["box"].split(",")]
        box = tuple((int(first), int(last)) for first, last in sides)
        num_elements = math.prod(last - first for first, last in box)
        start, stop = (int(found["start"]), int(found["stop"])) if found["start"] else (0, num_elements)
        if any(first >= last for first, last in box) or not 0 <= start < stop <= num_elements:
            raise ValueError(f"{key[:200]!r} has an empty range, or one that leaves its box")
        piece = cls(cast(StateKind, found["kind"]), found["name"], box, start, stop)
        if piece.key != key:  # other digits, leading zeros, or a run that is the whole box
            raise ValueError(f"{key[:200]!r} is not the canonical key of its slice, {piece.key!r}")
        return piece

    @property
    def key(self) -> str:
        """The slice as text in numpy's notation: `exp_avg/model.norm.weight[0:16]`, with `.flat[4:8]` for a run."""
        box = ",".join(f"{first}:{last}" for first, last in self.box)
        return f"{self.kind}/{self.name}[{box}]" + ("" if self.is_box else f".flat[{self.start}:{self.stop}]")

    @property
    def row(self) -> tuple[int, int, int, int, int, int]:
        """The slice as six numbers: first row and end, first column and end, `start`, `stop`. A vector is one row."""
        (top, bottom), (left, right) = self.box if len(self.box) == 2 else ((0, 1), *self.box)
        return top, bottom, left, right, self.start, self.stop

    @property
    def is_box(self) -> bool:
        """Whether the slice has all elements of its box."""
        return self.stop - self.start == math.prod(self._box_shape)  # `len` refuses numbers beyond 63 bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice's tensor: that of the box, or one dimension where the slice is only a run of it."""
        return self._box_shape if self.is_box else (len(self),)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def _box_shape(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in self.box)

    def _rectangles(self) -> Iterator[_Rectangle]:
        """Yield at most three rectangles: the rest of a row, whole rows, and the beginning of a row."""
        (top, _), (left, right) = self.box if len(self.box) == 2 else ((0, 1), *self.box)
        width, position = right - left, self.start
        while position < self.stop:
            row, column = divmod(position, width)
            rest = self.stop - position
            height, length = (rest // width, width) if column == 0 and rest >= width else (1, min(width - column, rest))
            first = left + column
            yield _Rectangle(top + row, top + row + height, first, first + length, position - self.start)
            position += height * length


class _Rectangle(NamedTuple):
    top: int
    bottom: int
    left: int
    right: int
    offset: int
    """Position of the rectangle's first element within the slice."""

    def intersect(self, other: _Rectangle) -> _Rectangle | None:
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return _Rectangle(top, bottom, left, right, 0) if top < bottom and left < right else None

    def view(self, flat: Tensor, part: _Rectangle) -> Tensor:
        """Return a view of `part` of this rectangle in the flat tensor of the slice."""
        height, width = self.bottom - self.top, self.right - self.left
        full = flat[self.offset : self.offset + height * width].view(height, width)
        return full[part.top - self.top : part.bottom - self.top, part.left - self.left : part.right - self.left]


def overlap(one: StateSlice, other: StateSlice) -> bool:
    """Return whether two slices have an element in common."""
    return one.kind == other.kind and one.name == other.name and any(_common_rectangles(one, other))


def fill(target: StateSlice, tensor: Tensor, sources: Mapping[StateSlice, Callable[[], Tensor]]) -> None:
    """Write the elements of `target` into `tensor`, from slices that overlap with it and are read one by one.

    Raises `ValueError` unless each element is in one source.
    """
    flat, num_sources = tensor.view(-1), torch.zeros(len(target), dtype=torch.uint8)
    for source, read in sources.items():
        found = read().view(-1)
        for theirs, ours, part in _common_rectangles(source, target):
            ours.view(flat, part).copy_(theirs.view(found, part))
            ours.view(num_sources, part).add_(1)
    num_wrong = len(target) - int((num_sources == 1).sum())
    if num_wrong:
        raise ValueError(f"{num_wrong:,} of {len(target):,} elements of {target.key} are missing or there twice")


def _common_rectangles(one: StateSlice, other: StateSlice) -> Iterator[tuple[_Rectangle, _Rectangle, _Rectangle]]:
    for mine in one._rectangles():
        for theirs in other._rectangles():
            part = mine.intersect(theirs)
            if part:
                yield mine, theirs, part
