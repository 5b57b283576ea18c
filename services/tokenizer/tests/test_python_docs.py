"""`pydoc://` gives the documentation of modules without importing them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from services.common.errors import ArtifactError, DeviceError
from services.common.recipe.schema import Source
from services.tokenizer.sources import python_docs
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.builders import MAX_DOCUMENT_BYTES, read_all


def read_library(library: Path) -> dict[str, str]:
    return {
        file.name: document.decode()
        for file in python_docs.list_modules(library)
        for batch in read_documents(cut_file(file, 2**20), "reject", MAX_DOCUMENT_BYTES)
        for document in batch.documents()
    }


def write_library(folder: Path, **modules: str) -> Path:
    (folder / "pydoc_data").mkdir(parents=True)
    (folder / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The if statement', 'not': 'no' 'thing'}")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return folder


def test_this_python_has_more_than_a_megabyte_of_documentation() -> None:
    before = set(sys.modules)
    files = list_inputs(Source(uri="pydoc://"))
    documents = read_all(Source(uri="pydoc://"), 2**20)

    assert sum(map(len, documents)) > 1_000_000
    reference = next(text for text in documents if text.startswith('The "if" statement'))
    assert 'if_stmt ::= "if"' in reference
    decoder = next(text for text in documents if text.startswith("json.decoder\n"))
    assert "class json.decoder.JSONDecoder(object)\n\n    Simple JSON <https://json.org> decoder\n" in decoder
    assert "\n    json.decoder.JSONDecoder.decode(self, s, _w=WHITESPACE.match)\n\n        Return the Python" in decoder
    assert not [file.name for file in files if "site-packages" in file.name or "/test/" in f"/{file.name}"]
    assert not {"turtle", "tkinter", "antigravity"} & (set(sys.modules) - before)


def test_a_module_reads_like_its_documentation(tmp_path: Path) -> None:
    source = '''
"""Say hello."""
raise SystemExit("imported")

class Greeter(Base, metaclass=Meta):
    """Greets.

    Politely.
    """

    def silent(self): ...

    async def greet(self, name: str = "you", *, loud=False) -> None:
        """Greet one."""

if True:
    def leave():
        """Say good-bye."""
else:
    class Empty:
        def inner(self):
            """Documented inside."""
'''
    library = write_library(tmp_path / "lib", hello=source, undocumented="x = 1\n")
    assert read_library(library)["hello.py"] == (
        "hello\n\nSay hello.\n\n"
        "class hello.Greeter(Base)\n\n"
        "    Greets.\n\n    Politely.\n\n"
        "    async hello.Greeter.greet(self, name: str='you', *, loud=False) -> None\n\n"
        "        Greet one.\n\n"
        "hello.leave()\n\n    Say good-bye.\n\n"
        "class hello.Empty\n\n"
        "    hello.Empty.inner(self)\n\n"
        "        Documented inside.\n\n"
    )
    assert "undocumented.py" not in read_library(library)


def test_a_module_that_does_not_parse_is_an_error(tmp_path: Path) -> None:
    library = write_library(tmp_path / "lib", broken="def f(:\n")
    with pytest.raises(ArtifactError, match=r"broken\.py"):
        read_library(library)


def test_a_python_without_documentation_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=re.escape(python_docs.TOPICS)):
        python_docs.list_modules(tmp_path)
