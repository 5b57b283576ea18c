"""The compiler stage traces as many ranks as have graphs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.testing.recipes import make_recipe
from services.compiler import compile as stage
from services.compiler.compile import TraceReport

RANKS = (0, 2, 4, 6)


@pytest.mark.parametrize(("lists_ranks", "traced", "graphs"), [(True, RANKS, 20), (False, RANKS[:2], 5)])
def test_ranks_are_traced_until_one_has_the_graphs_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists_ranks: bool, traced: tuple[int, ...], graphs: int
) -> None:
    """A rank whose graphs list the workers of its model has five graphs that no other model has."""
    calls: list[int] = []

    def trace(recipe: object, folder: Path, title: str, rank: int) -> TraceReport:
        calls.append(rank)
        new = [f"{rank}-{number}" for number in range(5)] if lists_ranks or rank == 0 else []
        return TraceReport(len(new), tuple(new))

    monkeypatch.setattr(stage, "trace_in_child", trace)
    assert stage._compile_ranks(make_recipe(tmp_path), tmp_path, RANKS) == graphs
    assert tuple(calls) == traced
