"""`datasets://` gives the rows of `datasets.load_dataset`, in the same order, and a template's texts of them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import fsspec
import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.builders import Stage, decode_documents, published, read_all

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


def save_again(folder: Path, rows: datasets.Dataset) -> None:
    """Save in more files and then in fewer, of which the first ones remain."""
    rows.save_to_disk(folder, num_shards=4)
    rows.save_to_disk(folder, num_shards=2)


def save_and_map(folder: Path, rows: datasets.Dataset) -> None:
    rows.save_to_disk(folder)
    datasets.load_from_disk(folder).map(lambda row: {"text": row["text"].upper()})


def save_and_filter(folder: Path, rows: datasets.Dataset) -> None:
    rows.save_to_disk(folder)
    datasets.load_from_disk(folder).filter(lambda row: "7" in row["text"])


SAVED: tuple[Callable[[Path, datasets.Dataset], None], ...] = (save_again, save_and_map, save_and_filter)


@pytest.mark.parametrize("save", SAVED)
def test_a_folder_of_save_to_disk_has_the_rows_of_load_from_disk(
    tmp_path: Path, save: Callable[[Path, datasets.Dataset], None]
) -> None:
    """`map` and `filter` leave their results beside the rows, and saving again its earlier files."""
    folder, rows = tmp_path / "all" / "saved", datasets.Dataset.from_dict({"text": TEN_LINES.splitlines()})
    save(folder, rows)
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/saved", recursive=True)
    expected = datasets.load_from_disk(folder)["text"]

    for uri in (str(folder), f"{folder}/*.arrow", str(tmp_path / "all"), "memory://saved", f"datasets://{folder}"):
        assert read_all(Source(uri=uri)) == expected
    assert read_all(Source(uri=f"datasets://{folder}", template="{{ text }}!")) == [f"{text}!" for text in expected]
    memory.rm("/saved", recursive=True)


def test_saved_splits_are_read_one_by_one(tmp_path: Path) -> None:
    rows = {name: datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(5)]}) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path)
    for name, split in rows.items():
        assert read_all(Source(uri=f"datasets://{tmp_path}", split=name)) == split["text"]
    with pytest.raises(ArtifactError, match="train, test"):
        read_all(Source(uri=f"datasets://{tmp_path}", split="dev"))


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"a.jsonl": objects("x", key="body")}, RecipeError),
        ({"a.jsonl": objects(1, 2)}, RecipeError),
        ({"a.jsonl": objects(["x"])}, RecipeError),
        ({"a.csv": "body\nx\n"}, RecipeError),
        ({"a.csv": "text\n1\n2\n"}, RecipeError),
        ({"a.parquet": parquet(body=["x"])}, RecipeError),
        ({"a.png": b"", "metadata.csv": "file_name,text\na.png,x\n"}, RecipeError),
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


# Templates


CHAT = "{% for m in messages %}\n  {% if m.content %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n{% endfor %}\n"
TURNS = [{"role": "user", "content": "What?\n\u00e9"}, {"role": "assistant", "content": None}]
CHATS = [[*TURNS, {"role": "user", "content": f"{number} is a number"}] for number in range(30)]
CALLS = [[*TURNS, {"role": "tool", "content": "x", "arguments": each}] for each in ({"b": ["c"]}, {"d": 1})]
SQUAD = {
    "question": ["Who?", "When?", "Where?"],
    "answers": [{"text": [f"a {number}", "b<c>"], "values": [number, None]} for number in range(3)],
    "by": [None, {"name": "z", "age": 3.5}, {"name": "y", "age": None}],
}


def tar(*names: str, **fields: bytes) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as made:
        for name in names:
            for field, content in fields.items():
                entry = tarfile.TarInfo(f"{name}.{field.replace('_', '.')}")
                entry.size = len(content)
                made.addfile(entry, io.BytesIO(content))
    return sink.getvalue()


SAMPLE = {"txt": b"x\n", "json": b'{"z": 1, "a": ["b", "c"]}', "why_txt": b"because"}
CASES: dict[str, tuple[Mapping[str, str | bytes], str]] = {
    "conversations": ({f"{n}.jsonl": objects(*CHATS[n::2], key="messages") for n in range(2)}, CHAT),
    "an array": ({"a.json": json.dumps([{"messages": chat} for chat in CHATS])}, CHAT),
    "objects of many types": ({"a.jsonl": objects(*CALLS, key="turns")}, "{{ turns[2].arguments | tojson }}"),
    "keys that some messages lack": (
        {"a.jsonl": objects(TURNS, *CALLS, key="turns")},
        "{% for m in turns %}{% if m.arguments %}{{ m.arguments | tojson }}{% endif %}{{ m.role }}{% endfor %}",
    ),
    "nested columns": (
        {"a.parquet": parquet(**SQUAD), "b.parquet": parquet(**SQUAD)},
        "{{ question }} {{ answers.text | join(' <or> ') }} {{ answers['values'][0] }} {{ by | tojson }}",
    ),
    "CSV": ({"a.csv": "id,a b\n1,x\n2,\n", "b.csv": "id,a b\n3,7\n"}, "{{ id }} {{ row['a b'] | tojson }}"),
    "a card": ({"README.md": card(sep=";"), "data/a.csv": "id;text\n1;x, y\n"}, "{{ id }} {{ text }} of one row"),
    "Arrow": ({"a.arrow": arrow("x", None), "b.arrow": arrow("z")}, "{{ text or '-' }}"),
    "WebDataset": (
        {"a.tar": tar("s1", "s2", **SAMPLE), "b.tar": tar("s3", **SAMPLE)},
        "{{ txt }} {{ row['why.txt'] }} {{ json.a[1] }} {{ json | tojson }} {{ __key__ }}",
    ),
}


def expect(folder: Path, template: str) -> list[str]:
    """Render the rows of `load_dataset` with Jinja2, whose blocks and `tojson` are those of chat templates."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    rows = datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.parent / "cache"))
    return [environment.from_string(template).render(**row, row=row) for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_documents_are_those_of_datasets_and_jinja(tmp_path: Path, name: str) -> None:
    files, template = CASES[name]
    folder = write(tmp_path / "folder", files)
    source = Source(uri=f"datasets://{folder}", template=template)
    assert read_all(source) == expect(folder, template)
    other = source.model_copy(update={"template": f"{template}!"})
    assert list_inputs(other).digest != list_inputs(source).digest


def test_a_corpus_of_all_of_them_is_the_same_for_any_workers(stage: Stage, tmp_path: Path) -> None:
    sources, texts, made = [], list[str](), []
    for number, (files, template) in enumerate(CASES.values()):
        folder = write(tmp_path / str(number), files)
        sources.append({"uri": f"datasets://{folder}", "template": template})
        texts += expect(folder, template)
    for workers in (1, 2):
        stage.root = tmp_path / f"fsx-{workers}"
        assert stage.run(*sources, tokenizer__num_workers=workers) == 0
        made.append(published(stage.root))
        assert [document.decode() for document in decode_documents(made[-1].path, "train")] == texts
        assert made[-1].manifest.corpus.documents_read == len(texts)
    assert len({(corpus.manifest.id, corpus.manifest.content_digest) for corpus in made}) == 1


LLAMA = """{%- if not date_string is defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- date_string }}{%- if tools is not none %} {{- tools | tojson(indent=4) }}{%- endif %}
{%- for m in messages %}{%- if m.role == "tool" and tools is none %}{{- raise_exception("no tools") }}{%- endif %}
{{- m.role + ": " }}{% generation %}{{ m.content or "-" }}{% endgeneration %}{% if not loop.last %}, {% endif %}
{%- endfor %}{% if add_generation_prompt %} assistant: {% endif %}"""
QWEN = """{%- if tools %}{{ tools }}{% endif %}{%- set ns = namespace(last=messages|length - 1) %}
{%- if enable_thinking is defined and enable_thinking is false %}off {% endif %}{{- messages[ns.last].content }}"""


@pytest.mark.parametrize("template", [LLAMA, QWEN])
def test_a_chat_template_gives_the_text_of_apply_chat_template(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tools; and where it would print the day's date, it takes the date that it has for other libraries."""
    folder = write(tmp_path / "folder", {"a.jsonl": objects(*CHATS, key="messages")})
    render: Any = render_jinja_template  # its types are not so
    expected, _ = render(CHATS, chat_template=template)
    today = datetime.now().strftime("%d %b %Y")  # noqa: DTZ005 - as transformers takes it
    expected = [text.replace(today, "26 Jul 2024") for text in expected]
    assert read_all(Source(uri=f"datasets://{folder}", template=template)) == expected


def test_what_a_template_raises_is_a_bad_row(tmp_path: Path) -> None:
    source = Source(uri=f"datasets://{write(tmp_path / 'calls', CASES['objects of many types'][0])}", template=LLAMA)
    with pytest.raises(RecipeError, match="messages"):
        read_all(source)
    with pytest.raises(ArtifactError, match=r"row 1: .*no tools"):
        read_all(source.model_copy(update={"template": LLAMA.replace("messages", "turns")}))


PHOTO = {"a.tar": tar("s1", "s2", txt=b"x", jpg=b"no image")}
TWO = {"a.jsonl": objects(CHATS[0], [], CHATS[1], key="messages")}


@pytest.mark.parametrize(
    ("files", "template", "error", "named"),
    [
        (TWO, "{{ text }} {{ row.id }}", RecipeError, "names text. The columns are id: .*, messages: "),
        (PHOTO, "{{ jpg }}", RecipeError, "The columns are txt"),
        (TWO, "{{ id", RecipeError, "line 1"),
        (TWO, "{{ messages | random }}", RecipeError, "random"),
        (TWO, "{{ strftime_now('%Y') }}", RecipeError, "strftime_now"),
        (TWO, "{% if mesages %}{{ id }}{% endif %}", RecipeError, "mesages"),
        (TWO, "{{ messages[0].content }}", ArtifactError, r"a\.jsonl: row 2: .*messages: List"),
        (TWO, "{{ messages[0].text }}", ArtifactError, "row 1: .*'text'"),
        (TWO, "{{ messages[0].text | trim }}", ArtifactError, "row 1: .*'text'"),
        (TWO, "{{ messages }}", ArtifactError, "row 1: .*list"),
        (TWO, "{{ messages.copy }}", ArtifactError, "row 1: .*method"),
        ({"a.csv": "id,text\n1,x\n2,\n"}, "{{ text }}", ArtifactError, "row 2: .*null"),
    ],
)
def test_what_a_row_lacks_is_named(
    tmp_path: Path, files: Mapping[str, str | bytes], template: str, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_all(Source(uri=f"datasets://{write(tmp_path / 'folder', files)}", template=template))


def test_rows_that_are_not_rendered_are_counted_and_images_are_not_read(tmp_path: Path) -> None:
    bad_rows, uri = BadRows("skip"), f"datasets://{write(tmp_path / 'two', TWO)}"
    assert read_all(Source(uri=uri, template="{{ messages[0].content }}"), bad_rows=bad_rows) == ["What?\n\u00e9"] * 2
    assert [file.rows for file in bad_rows.files()] == [{"not rendered": 1}]
    photo = f"datasets://{write(tmp_path / 'photo', PHOTO)}"
    assert read_all(Source(uri=photo, template="{{ txt }}")) == read_all(Source(uri=photo, column="txt")) == ["x"] * 2


def test_a_template_is_for_rows_and_a_source_without_one_is_stored_as_before() -> None:
    for keys in ({"uri": "a.jsonl"}, {"uri": "datasets://a", "column": "b"}):
        with pytest.raises(ValueError, match="template"):
            Source(**keys, template="{{ text }}")  # type: ignore[arg-type]
    assert "template" not in Source(uri="a").model_dump()
