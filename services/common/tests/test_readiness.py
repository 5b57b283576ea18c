"""A stage is ready when its inputs are published and fit the recipe, and when it can write below the root."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import (
    SPLITS,
    CorpusManifest,
    Split,
    SplitCounts,
    Vocabulary,
    shard_path,
    tail_path,
)
from services.common.artifacts.store import Address, Artifact, Draft, Workspace, publish_once
from services.common.process.entry_point import exit_code_of
from services.common.process.readiness import main
from services.common.testing.artifacts import fill, publish
from services.common.testing.corpora import corpus_payload
from services.common.testing.recipes import make_recipe, write_recipe
from services.common.tests.builders import REPOSITORY

NOTHING = SplitCounts(
    documents=0, text_bytes=0, document_tokens=0, bos=0, eos=0, rows=0, tail_tokens=0, check_digests=("0" * 32,)
)


def publish_corpus(
    folder: Path, vocab_size: int = 300, sequence_length: int = 16, identifier: str = "c" * 16
) -> Artifact[CorpusManifest]:
    """Publish a corpus of one sample for the small recipe; its files have any content, because no test reads them."""
    recipe = make_recipe(folder, corpus__sequence_length=f"{sequence_length}")
    changes = {"documents": 1, "text_bytes": 100, "document_tokens": sequence_length - 1, "bos": 1, "eos": 1}
    changes |= {"rows": 1, "tail_tokens": 1}
    one_sample = NOTHING.model_copy(update={**changes, "check_digests": ("0" * 32,) * 2})

    def build(workspace: Workspace) -> Draft:
        fill(workspace, {path: identifier.encode() for path in ("m", shard_path("train", 0), *map(tail_path, SPLITS))})
        vocabulary = Vocabulary(
            kind="sentencepiece",
            path="m",
            sha256=hashlib.sha256(identifier.encode()).hexdigest(),
            vocab_size=vocab_size,
            bos_id=1,
            eos_id=2,
        )
        splits: dict[Split, SplitCounts] = {"train": one_sample, "validation": NOTHING}
        rows_per_shard = recipe.corpus.rows_per_shard
        return Draft(corpus_payload(vocabulary, splits, sequence_length=sequence_length, rows_per_shard=rows_per_shard))

    address = Address(folder / "fsx", "corpus", "sentences", identifier)
    return publish_once(address, CorpusManifest, "tokenizer", recipe, build)[0]


def ask(
    capsys: pytest.CaptureFixture[str], folder: Path, stage: str, *options: str, root: Path | None = None
) -> tuple[int, Any]:
    """Run the check; return its exit code and the printed object."""
    command = ["--stage", stage, "--recipe", str(write_recipe(folder)), "--root", str(root or folder / "fsx")]
    exit_code = exit_code_of(lambda: main([*command, *options]))
    return exit_code, json.loads(capsys.readouterr().out)


def test_a_trainer_is_ready_when_corpus_and_compile_cache_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_corpus(tmp_path, identifier="a" * 16)
    corpus = publish_corpus(tmp_path)
    cache, _ = publish(tmp_path / "fsx", make_recipe(tmp_path))

    exit_code, report = ask(capsys, tmp_path, "trainer", "--train.max_steps=7")

    assert (exit_code, report["problem"]) == (0, None)
    assert [(link["schema"], link["name"]) for link in report["upstream"]] == [
        ("corpus/4", "sentences"),
        ("compile_cache/1", "small"),
    ]
    assert [(link["id"], link["content_digest"]) for link in report["upstream"]] == [
        (made.manifest.id, made.manifest.content_digest) for made in (corpus, cache)
    ]
    assert sorted(path.name for path in (tmp_path / "fsx").iterdir()) == ["compile_cache", "corpus"]


@pytest.mark.parametrize(("stage", "variant"), [("tokenizer", "neuron"), ("compiler", "cpu")])
def test_the_first_stages_need_a_place_to_write_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str, variant: str
) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", variant)

    exit_code, report = ask(capsys, tmp_path, stage)

    assert (exit_code, report["upstream"], report["problem"]) == (0, [], None)
    assert report["platform"].keys() == {"variant", "python", "ray"}
    assert (report["platform"]["variant"], report["platform"]["python"]) == (variant, platform.python_version())


def test_a_missing_input_names_the_stage_that_makes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path / "fsx", make_recipe(tmp_path, batch__micro_batch_size="4"))
    exit_code, report = ask(capsys, tmp_path, "trainer")
    assert (exit_code, report["upstream"]) == (3, [])
    assert "services.tokenizer" in report["problem"]

    publish_corpus(tmp_path)
    exit_code, report = ask(capsys, tmp_path, "trainer")
    assert (exit_code, len(report["upstream"])) == (3, 1)
    assert "services.compiler" in report["problem"]

    exit_code, report = ask(capsys, tmp_path, "trainer", "--compile.enabled=false")
    assert (exit_code, len(report["upstream"])) == (0, 1)


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ({"vocab_size": 301}, "--model.vocab_size=301"),
        ({"sequence_length": 8}, "corpus.sequence_length"),
    ],
)
def test_a_corpus_that_does_not_fit_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: dict[str, int], message: str
) -> None:
    published = publish_corpus(tmp_path, corpus.get("vocab_size", 300), corpus.get("sequence_length", 16))

    exit_code, report = ask(capsys, tmp_path, "trainer", "--corpus", str(published.path))

    assert exit_code == 3
    assert message in report["problem"]


def test_a_root_that_cannot_be_written_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    exit_code, report = ask(capsys, tmp_path, "tokenizer", root=tmp_path / "file")

    assert exit_code == 5
    assert "--root" in report["problem"]


@pytest.mark.parametrize(
    ("stage", "option", "said"),
    [
        ("head", "--train.max_steps=7", "'head'"),
        ("trainer", "--train.new=7", "'train.new'"),
    ],
)
def test_what_the_stage_does_not_take_is_told_with_its_platform(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: str, option: str, said: str
) -> None:
    """The caller also compares the platform with that of the cluster."""
    exit_code, report = ask(capsys, tmp_path, stage, option)

    assert exit_code == 2
    assert said in report["problem"]
    assert report["platform"]["python"] == platform.python_version()


def test_the_head_image_can_ask() -> None:
    """The head's image has neither torch nor a stage."""
    program = "import sys, services.common.process.readiness; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    loaded = done.stdout.split()
    assert not {"torch", "ray"} & set(loaded)
    assert not [name for name in loaded if name.startswith("services.") and not name.startswith("services.common")]
