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
from services.common.errors import shell_command
from services.common.process.entry_point import exit_code_of
from services.common.process.readiness import main
from services.common.testing.artifacts import fill, publish
from services.common.testing.commands import REPOSITORY
from services.common.testing.corpora import corpus_payload
from services.common.testing.recipes import make_recipe, write_recipe


def publish_corpus(
    folder: Path, vocab_size: int = 300, sequence_length: int = 16, identifier: str = "c" * 16
) -> Artifact[CorpusManifest]:
    """Publish a corpus of one sample for the small recipe; its files have any content, because no test reads them."""
    recipe = make_recipe(folder, corpus__sequence_length=f"{sequence_length}")

    def build(workspace: Workspace) -> Draft:
        fill(workspace, {path: identifier.encode() for path in ("m", shard_path("train", 0), *map(tail_path, SPLITS))})
        digest = hashlib.sha256(identifier.encode()).hexdigest()
        vocabulary = Vocabulary(
            kind="sentencepiece", path="m", sha256=digest, vocab_size=vocab_size, bos_id=1, eos_id=2
        )
        train, validation = (
            SplitCounts(
                **dict.fromkeys(("documents", "text_bytes", "bos", "eos", "rows", "tail_tokens"), number),
                document_tokens=number * (sequence_length - 1),
                check_digests=("0" * 32,) * (number + 1),
            )
            for number in (1, 0)
        )
        splits: dict[Split, SplitCounts] = {"train": train, "validation": validation}
        return Draft(corpus_payload(vocabulary, splits, sequence_length=sequence_length, rows_per_shard=32_768))

    address = Address(folder / "fsx", "corpus", "sentences", identifier)
    return publish_once(address, CorpusManifest, "tokenizer", recipe, build)[0]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs the check, and returns its exit code and the printed object."""

    def run(stage: str, *options: str) -> tuple[int, Any]:
        command = ["--stage", stage, "--recipe", str(write_recipe(tmp_path)), "--root", str(tmp_path / "fsx")]
        exit_code = exit_code_of(lambda: main([*command, *options]))
        return exit_code, json.loads(capsys.readouterr().out)

    return run


def test_a_trainer_is_ready_when_corpus_and_compile_cache_are_there(tmp_path: Path, ask: Any) -> None:
    publish_corpus(tmp_path, identifier="a" * 16)
    corpus = publish_corpus(tmp_path)
    cache, _ = publish(tmp_path / "fsx", make_recipe(tmp_path))

    exit_code, report = ask("trainer", "--train.max_steps=7")

    assert (exit_code, report["problem"]) == (0, None)
    assert [tuple(link.values()) for link in report["upstream"]] == [
        (made.schema_id, made.name, made.id, made.content_digest) for made in (corpus.manifest, cache.manifest)
    ]
    assert sorted(path.name for path in (tmp_path / "fsx").iterdir()) == ["compile_cache", "corpus"]


@pytest.mark.parametrize(("stage", "variant"), [("tokenizer", "neuron"), ("compiler", "cpu")])
def test_the_first_stages_need_a_place_to_write_alone(
    monkeypatch: pytest.MonkeyPatch, ask: Any, stage: str, variant: str
) -> None:
    monkeypatch.setenv("MILLRACE_VARIANT", variant)

    exit_code, report = ask(stage)

    assert (exit_code, report["upstream"], report["problem"]) == (0, [], None)
    assert report["platform"].keys() == {"variant", "python", "ray"}
    assert (report["platform"]["variant"], report["platform"]["python"]) == (variant, platform.python_version())


def test_a_missing_input_names_the_stage_that_makes_it(tmp_path: Path, ask: Any) -> None:
    publish(tmp_path / "fsx", make_recipe(tmp_path, batch__micro_batch_size="4"))
    exit_code, report = ask("trainer")
    assert (exit_code, report["upstream"]) == (3, [])
    assert shell_command("services.tokenizer", "tokenize") in report["problem"]

    publish_corpus(tmp_path)
    exit_code, report = ask("trainer")
    assert (exit_code, len(report["upstream"])) == (3, 1)
    assert shell_command("services.compiler", "compile") in report["problem"]

    exit_code, report = ask("trainer", "--compile.enabled=false")
    assert (exit_code, len(report["upstream"])) == (0, 1)


@pytest.mark.parametrize(
    ("vocab_size", "sequence_length", "said"),
    [(301, 16, "--model.vocab_size=301"), (300, 8, "corpus.sequence_length")],
)
def test_a_corpus_that_does_not_fit_is_a_problem(
    tmp_path: Path, ask: Any, vocab_size: int, sequence_length: int, said: str
) -> None:
    published = publish_corpus(tmp_path, vocab_size, sequence_length)

    exit_code, report = ask("trainer", "--corpus", str(published.path))

    assert exit_code == 3
    assert said in report["problem"]


@pytest.mark.parametrize(
    ("stage", "option", "exit_code", "said"),
    [
        ("head", "--train.max_steps=7", 2, "'head'"),
        ("trainer", "--train.new=7", 2, "'train.new'"),
        ("tokenizer", f"--root={__file__}", 5, "--root"),
    ],
)
def test_what_the_stage_cannot_take_is_told_with_its_platform(
    ask: Any, stage: str, option: str, exit_code: int, said: str
) -> None:
    """The caller also compares the platform with that of the cluster."""
    found, report = ask(stage, option)

    assert found == exit_code
    assert said in report["problem"]
    assert report["platform"]["python"] == platform.python_version()


def test_the_head_image_can_ask() -> None:
    """The head's image has neither torch nor a stage."""
    program = "import sys, services.common.process.readiness; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    loaded = done.stdout.split()
    assert not {"torch", "ray"} & set(loaded)
    assert not [name for name in loaded if name.startswith("services.") and not name.startswith("services.common")]
