"""Runs the stage over bad sources, and writes good files for tests to damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.tokenizer.tests.builders import is_anything_published, make_documents, run, write_recipe

TEXTS = [document.decode() for document in make_documents(60)]


class Stage:
    """Runs the stage with a given vocabulary, so that errors come from the sources."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.root = folder, folder / "fsx"
        self._model, self._capsys = model, capsys

    def run(self, *uris: str | Path, **settings: Any) -> int:
        recipe = write_recipe(self.folder, *uris, model=self._model, **settings)
        self._capsys.readouterr()
        return run(recipe, self.root)

    def refuse(self, exit_code: int, *uris: str | Path, **settings: Any) -> str:
        """Run the stage, check that it publishes nothing and ends with `exit_code`, and return its error message."""
        assert self.run(*uris, **settings) == exit_code
        assert not is_anything_published(self.root)
        errors = self._capsys.readouterr().err
        assert errors.count("millrace: ") == 1
        assert "Traceback" not in errors
        return errors[errors.index("millrace: ") :]


def jsonl(texts: Sequence[object]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, **settings: Any) -> pq.FileMetaData:
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, path, row_group_size=20, use_dictionary=False, **settings)
    return pq.read_metadata(path)


def write_table(path: Path, table: pa.Table, writer: Callable[..., Any], rows: int = 20) -> None:
    """Write record batches or row groups of so many rows with `pa.ipc.new_file`, `new_stream` or `pq.ParquetWriter`."""
    with writer(str(path), table.schema) as file:
        file.write_table(table, rows)


def overwrite(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)
