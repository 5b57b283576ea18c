"""A corpus that the tests of the tools look at, and the tools as a user calls them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.common.entry_point import exit_code_of
from services.tokenizer.__main__ import main
from services.tokenizer.tests.builders import VOCAB_SIZE, make_documents
from services.tokenizer.tests.tools.corpora import SPECIAL, Said, Tool, make_corpus
from services.tokenizer.vocabulary.training import train_vocabulary


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    def use(*arguments: str | Path) -> Said:
        capsys.readouterr()
        exit_code = exit_code_of(lambda: main([str(each) for each in arguments]))
        return Said(exit_code, *capsys.readouterr())

    return use


@pytest.fixture(scope="session")
def documents() -> list[bytes]:
    return [*make_documents(50), SPECIAL, b"A document whose end is long after its begin. " * 40]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, documents: list[bytes]) -> Path:
    path = tmp_path_factory.mktemp("model") / "given.model"
    path.write_bytes(train_vocabulary(documents, VOCAB_SIZE))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[bytes], model: Path) -> Artifact[CorpusManifest]:
    """52 documents in several shards of both splits."""
    overrides: dict[str, Any] = {"corpus__validation_fraction": 0.3, "tokenizer__model": str(model)}
    return make_corpus(tmp_path_factory.mktemp("corpus"), documents, **overrides)


@pytest.fixture
def copy(corpus: Artifact[CorpusManifest], tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus.path, tmp_path / "copy"))
