"""Each mistake is made, and then what its message advises is done to the letter: the second run publishes a corpus."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.tokenizer.tests.builders import TEXTS, Stage, jsonl, published, run, write_jsonl, write_recipe
from services.tokenizer.tests.tokenizer_folders import write_llama3, write_qwen

LATIN = "\n".join(f"déjà vu à l'été {number}" for number in range(200))
Change = Mapping[str, Any]
Follow = Callable[[str, Path, Mapping[str, Any]], Change]
"""Takes a message, a folder and the source; returns what to change in the source, or a key of the recipe."""


def write_csv(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("id,text\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(TEXTS)))


def write_in_folder(path: Path) -> None:
    path.parent.mkdir()
    write_jsonl(path, TEXTS)


def write_latin(path: Path) -> None:
    path.write_bytes(LATIN.encode("latin-1"))


def quoted(message: str, key: str) -> str:
    """Return the value of `key = "value"` in a message."""
    found = re.search(rf'{key} = "([^"]*)"', message)
    assert found, message
    return found[1]


def convert(message: str, folder: Path, source: Mapping[str, Any]) -> Change:
    """Run the command in backticks, on the unpacked text where the message says so."""
    path = Path(source["uri"])
    if "unpacked" in message:
        subprocess.run(["gzip", "-dk", str(path)], check=True)
        path = path.with_suffix("")
    copy = folder / f"copy{path.suffix}"
    command = re.findall("`([^`]*)`", message)[0]
    for name, value in (("ENCODING", "LATIN1"), ("FILE", str(path)), ("COPY", str(copy))):
        command = command.replace(name, value)
    subprocess.run(command, shell=True, check=True)
    return {"uri": str(copy)}


SOURCES: dict[str, tuple[str, Callable[[Path], Any], Change, int, Follow]] = {
    # mistake: name of the file, what writes it, the source's other keys, exit code, and how to follow the advice
    "a bracket in a folder's name": (
        "[en]/a.jsonl",
        write_in_folder,
        {"uri": "[en]/*.jsonl"},
        3,
        lambda said, _, source: {"uri": source["uri"].replace("[", re.findall(r"\[ of a name as (\[\[\])", said)[0])},
    ),
    "a CSV": ("a.csv", write_csv, {}, 2, lambda said, *_: {"uri": quoted(said, "uri")}),
    "a folder of CSV": ("x/a.csv", write_csv, {"uri": "x"}, 2, lambda said, *_: {"uri": quoted(said, "uri")}),
    "a pattern of CSV": ("x/a.csv", write_csv, {"uri": "x/*.csv"}, 2, lambda said, *_: {"uri": quoted(said, "uri")}),
    "a CSV of a bracket": ("[x].csv", write_csv, {}, 2, lambda said, *_: {"uri": quoted(said, "uri")}),
    "an unknown ending": (
        "a.log",
        lambda path: path.write_text("\n".join(TEXTS)),
        {},
        2,
        lambda said, *_: {"format": quoted(said, "format")},
    ),
    "a list in a column": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"text": [[text] for text in TEXTS]}), path),
        {},
        2,
        lambda said, folder, _: {
            "uri": re.findall("`(datasets://)FOLDER`", said)[0] + str(folder / "text"),
            "template": "{{ text[0] }}",
        },
    ),
    "a field in a column": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"text": [{"en": text} for text in TEXTS]}), path),
        {},
        2,
        lambda said, *_: {"column": re.findall(r"to one of ([\w.]*\w)", said)[0]},
    ),
    "a key that is not there": (
        "a.jsonl",
        lambda path: path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS)),
        {},
        2,
        lambda said, *_: {"column": re.findall(r"the keys are (\w+)", said)[0]},
    ),
    "a split that is not there": (
        "train.jsonl",
        lambda path: write_jsonl(path, TEXTS),
        {"uri": "datasets://{folder}", "split": "all"},
        3,
        lambda said, *_: {"split": re.findall(r"its splits are (\w+)", said)[0]},
    ),
    "another encoding": ("a.txt", write_latin, {}, 3, convert),
    "another encoding in JSON": (
        "a.jsonl",
        lambda path: path.write_bytes(json.dumps({"text": LATIN}, ensure_ascii=False).encode("latin-1")),
        {},
        3,
        convert,
    ),
    "another encoding in gzip": (
        "a.txt.gz",
        lambda path: path.write_bytes(gzip.compress(LATIN.encode("latin-1"))),
        {},
        3,
        convert,
    ),
    "a bad row": (
        "a.jsonl",
        lambda path: path.write_bytes(jsonl(TEXTS) + b"{]\n"),
        {},
        3,
        lambda said, *_: {"corpus__bad_rows": quoted(said, r"corpus\.bad_rows")},
    ),
    "a bad byte": (
        "a.jsonl",
        lambda path: path.write_bytes(jsonl(TEXTS) + b'{"text": "\xff"}\n'),
        {"corpus__invalid_utf8": "reject"},
        3,
        lambda said, *_: {"corpus__invalid_utf8": quoted(said, r"corpus\.invalid_utf8")},
    ),
}


@pytest.mark.parametrize("mistake", SOURCES)
def test_a_wrong_source_is_mended_as_its_message_says(stage: Stage, tmp_path: Path, mistake: str) -> None:
    name, write, keys, exit_code, follow = SOURCES[mistake]
    folder = tmp_path / "text"
    folder.mkdir()
    write(folder / name)
    uri = str(keys.get("uri", name)).replace("{folder}", str(folder))
    source = {**keys, "uri": uri if uri.startswith("datasets://") else str(folder / uri)}
    settings = {key: source.pop(key) for key in list(source) if "__" in key}

    said = stage.refuse(exit_code, source, **settings)

    changes = follow(said, tmp_path, source)
    settings |= {key: value for key, value in changes.items() if "__" in key}
    source |= {key: value for key, value in changes.items() if "__" not in key}
    assert stage.run(source, **settings) == 0
    assert published(stage.root).manifest.corpus.documents_read > 0


def test_a_repository_of_text_is_named_as_the_hub_has_it(stage: Stage) -> None:
    assert " datasets://owner/name." in stage.refuse(3, "owner/name")


def without_dropout(said: str, folder: Path) -> list[str]:
    *parents, key = re.findall(r"set ([\w.]+) to null", said)[0].split(".")
    content = json.loads((folder / "tokenizer.json").read_text())
    inner = content
    for name in parents:
        inner = inner[name]
    inner[key] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return []


def with_dropout(folder: Path) -> None:
    write_qwen(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.2
    (folder / "tokenizer.json").write_text(json.dumps(content))


def two_special_tokens(said: str, _: Path) -> list[str]:
    [keys, tokens] = re.findall(r"Set (\S+ and \S+) to two of the file's special tokens: (.*)\.", said)[0]
    return [f"--{key}={token}" for key, token in zip(keys.split(" and "), tokens.split(", "), strict=True)]


@pytest.mark.parametrize(
    ("write", "name", "size", "exit_code", "follow"),
    [
        (write_llama3, "", 499, 2, lambda said, _: re.findall(r"(--model\.vocab_size=\d+)", said)),
        (write_qwen, "tokenizer.json", 501, 3, two_special_tokens),
        (with_dropout, "", 501, 3, without_dropout),
    ],
)
def test_a_wrong_tokenizer_is_mended_as_its_message_says(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
    name: str,
    size: int,
    exit_code: int,
    follow: Callable[[str, Path], list[str]],
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write(folder)
    text = write_jsonl(tmp_path / "text.jsonl", TEXTS)
    recipe = write_recipe(tmp_path, text, tokenizer__model=str(folder / name), model__vocab_size=size)

    assert run(recipe, tmp_path / "fsx") == exit_code

    assert run(recipe, tmp_path / "fsx", *follow(capsys.readouterr().err, folder)) == 0
