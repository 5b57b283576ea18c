"""`datasets://` gives the rows of `datasets.load_dataset`: as many, and the same texts in the same order."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.builders import read_all

TEN_LINES = "".join(f"line {number} of ten\n" for number in range(10))


def objects(*values: object, key: str = "text") -> str:
    return "".join(json.dumps({"id": number, key: value}) + "\n" for number, value in enumerate(values))


def card(**options: object) -> str:
    config = {"config_name": "default", "data_files": [{"split": "train", "path": "data/*"}], **options}
    return f"---\nconfigs: {json.dumps([config])}\n---\n"


def parquet(**columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def arrow(*texts: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def archive(files: Mapping[str, str]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as made:
        for name, content in files.items():
            made.writestr(name, content)
    return sink.getvalue()


FOLDERS: dict[str, Mapping[str, str | bytes]] = {
    "three files of ten lines": {f"{name}.txt": TEN_LINES for name in "abc"},
    "ends of lines": {"a.txt": b"unix\nwindows\r\nmac\rmixed\r\r\nend", "b.txt": b"\n\n  \n\tx\r\n\r\n"},
    "characters that end lines elsewhere": {"a.txt": "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\nh\x00i"},
    "no end of the last line, and empty files": {"a.txt": "", "b.txt": "x\ny", "c.txt": "\n", "d.txt": ""},
    "a byte-order mark": {"a.txt": "\ufeffhello\nworld\n".encode()},
    "a zip archive": {"a.zip": archive({"b.txt": TEN_LINES, "a.txt": "x\n"})},
    "whole documents by the card": {"README.md": card(sample_by="document"), "data/a.txt": TEN_LINES},
    "JSON lines": {"a.jsonl": objects("x", None, "", "\u00e9\n"), "b.jsonl": "\n" + objects("y") + "\n\n"},
    "an array": {"a.json": json.dumps([{"text": "x"}, {"text": None}, {"text": "y"}], indent=1)},
    "objects over several lines": {"a.json": '{\n "text": "x"\n}\n{\n "text": "y"\n}\n'},
    "a field by the card": {"README.md": card(field="rows"), "data/a.json": '{"rows": [{"text": "x"}, {"text": "y"}]}'},
    "an all-null part": {"a.jsonl": objects("x"), "b.jsonl": objects(None, None), "c.jsonl": objects("y")},
    "CSV": {"a.csv": 'id,text\n1,x\n2,"y, ""z""\nand more"\n\n3,\n4,NA\n', "b.csv": "id,text\n5,007\n6,8\n"},
    "a separator by the card": {"README.md": card(sep=";"), "data/a.csv": "id;text\n1;x, y\n2;z\n"},
    "Parquet": {"a.parquet": parquet(text=["x", None, "", "y", "z"]), "b.parquet": parquet(text=["w"])},
    "columns and filters by the card": {
        "README.md": card(filters=[["lang", "==", "en"]]),
        "data/a.parquet": parquet(text=["x", "y", "z"], lang=["en", "de", "en"]),
    },
    "Arrow": {"a.arrow": arrow("x", None, "y"), "b.arrow": arrow("z")},
    "a type by the card": {
        "README.md": "---\ndataset_info:\n  features:\n  - name: text\n    dtype: string\n---\n",
        "a.jsonl": objects(1, 2).replace('"id": 0, ', "").replace('"id": 1, ', ""),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read(folder: Path) -> list[str]:
    return read_all(Source(uri=f"datasets://{folder}"), 2**20)


@pytest.mark.parametrize("name", FOLDERS)
def test_rows_are_those_of_load_dataset(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "folder", FOLDERS[name])
    theirs = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))

    assert read(folder) == ["" if text is None else text for text in theirs["text"]]


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"a.jsonl": objects("x", key="body")}, RecipeError),
        ({"a.jsonl": objects(1, 2)}, RecipeError),
        ({"a.jsonl": objects(["x"])}, RecipeError),
        ({"a.csv": "body\nx\n"}, RecipeError),
        ({"a.csv": "text\n1\n2\n"}, RecipeError),
        ({"a.parquet": parquet(body=["x"])}, RecipeError),
        ({"a.tar": b""}, RecipeError),
        ({"a.txt": b"caf\xe9\n"}, ArtifactError),
        ({"a.csv": 'text\n"x\n'}, ArtifactError),
        ({"a.jsonl": '{"text": "x"\n'}, ArtifactError),
        ({"README.md": "---\nconfigs: [a: b\n---\n", "a.jsonl": objects("x")}, ArtifactError),
        ({}, ArtifactError),
    ],
    ids=str,
)
def test_a_folder_that_gives_no_text_is_refused(
    tmp_path: Path, files: Mapping[str, str | bytes], error: type[Exception]
) -> None:
    with pytest.raises(error, match="folder"):
        read(write(tmp_path / "folder", files))


def test_a_change_of_the_cards_options_is_another_input(tmp_path: Path) -> None:
    digests: set[str] = set()
    for options in ({"sep": ","}, {"sep": ";"}, {"sep": ";", "skip_blank_lines": False}):
        folder = write(tmp_path / "folder", {"README.md": card(**options)})
        if not digests:
            write(folder, {"data/a.csv": "text;id,text\nx;1,y\n"})
        digests.add(list_inputs(Source(uri=f"datasets://{folder}")).digest)
    assert len(digests) == 3
