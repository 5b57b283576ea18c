"""The stage ends with 5 on a full or read-only file system, and the same command continues later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.testing.disks import mounted, remount
from services.tokenizer.tests.builders import (
    is_anything_published,
    make_text,
    published,
    run,
    write_documents,
    write_recipe,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


@pytest.mark.parametrize(("size", "phase"), [("200k", "encode"), ("3m", "pack")])
def test_a_full_disk_stops_the_stage_and_space_lets_it_finish(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], size: str, phase: str
) -> None:
    """The corpus has 2.2 MB of tokens, in token files and then in shards."""
    text = write_documents(tmp_path / "text", [make_text(300_000, seed=seed) for seed in range(7)])
    recipe = write_recipe(
        tmp_path, text, corpus__split_bytes=300_000, corpus__rows_per_shard=10_000, tokenizer__num_workers=1
    )
    remount(small_disk, f"size={size}")

    assert run(recipe, small_disk / "fsx") == 5

    assert str(small_disk) in capsys.readouterr().err
    assert not is_anything_published(small_disk / "fsx")
    assert not list(small_disk.rglob("*.tmp"))
    assert any(small_disk.rglob("*.partial/train")) == (phase == "pack")

    remount(small_disk, "size=64m")
    assert run(recipe, small_disk / "fsx") == 0
    assert run(recipe, tmp_path / "undisturbed") == 0
    expected = published(tmp_path / "undisturbed").manifest.content_digest
    assert published(small_disk / "fsx").manifest.content_digest == expected


def test_a_read_only_root_is_named(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", [make_text(10_000)]))
    remount(small_disk, "ro")

    assert run(recipe, small_disk / "fsx") == 5

    assert str(small_disk) in capsys.readouterr().err
