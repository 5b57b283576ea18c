"""What another program wrote into an artifact, a run's folder or a command line is checked before it is believed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import safetensors
import safetensors.torch
import torch

from services.common.artifacts.checkpoint import checkpoint_id, shard_name, step_of
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.lease import hold_lease
from services.common.artifacts.store import CURRENT, Artifact, open_artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.artifacts.upstream import open_corpus
from services.common.errors import ArtifactError, UnreadableError
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Checkpoint
from services.common.testing.artifacts import publish, publish_checkpoint
from services.common.testing.manifests import forge, in_all_of_state
from services.trainer.__main__ import main
from services.trainer.checkpoints.lookup import newest_checkpoint, verify_checkpoint
from services.trainer.checkpoints.writer import discard_old
from services.trainer.conversion.export import export
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.inspection.sample import TextGenerator, load_model
from services.trainer.job import Job
from services.trainer.loop import load_part, train
from services.trainer.node_staging import compile_cache_folder, prepare_node
from services.trainer.run import RUN_FILE, open_run
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_program, make_recipe, write_recipe
from services.trainer.tests.runs import checkpoints

ALONE = WorkerEnvironment(rank=0, world_size=1, launch="inline")
SHARD = "train/shard-00000.arrow"
VALIDATION_SHARD = "validation/shard-00000.arrow"
TAIL = "train/tail/tail.arrow"

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    folder = tmp_path_factory.mktemp("published")
    return make_corpus(folder / "fsx", make_recipe(folder))


@pytest.fixture
def corpus(published: Artifact[CorpusManifest], tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(published.path, tmp_path / "corpus"))


def use(folder: Path) -> None:
    """What the trainer does with a corpus."""
    artifact = open_artifact(folder, CorpusManifest)
    verify_files(folder, artifact.manifest)
    for split in ("train", "validation"):
        stream = TokenStream(folder, artifact.manifest.corpus, split)
        stream.read_documents(range(stream.num_samples))


def in_corpus(**changes: Any) -> Change:
    return lambda fields: fields["corpus"].update(changes)


def in_split(**changes: Any) -> Change:
    return lambda fields: fields["corpus"]["splits"]["train"].update(changes)


def in_vocabulary(**changes: Any) -> Change:
    return lambda fields: fields["corpus"]["vocabulary"].update(changes)


def be_of_one_document(fields: dict[str, Any]) -> None:
    in_split(documents=1, bos=1, eos=1, document_tokens=80 * 16 + 5 - 2)(fields)
    fields["corpus"]["documents_read"] -= 53


def be_made_of(uri: str, weight: float) -> Change:
    """The corpus says that all of it comes from this source."""

    def change(fields: dict[str, Any]) -> None:
        splits = fields["corpus"]["splits"].values()
        documents = sum(split["documents"] for split in splits)
        tokens = documents * 2 + sum(split["document_tokens"] for split in splits)
        in_corpus(sources=[{"uri": uri, "weight": weight, "documents": documents, "tokens": tokens, "share": 1.0}])(
            fields
        )

    return change


def list_no(path: str) -> Change:
    return lambda fields: fields.update(files=[entry for entry in fields["files"] if entry["path"] != path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_vocabulary(path="../../../tokenizer.model"), "is no path below the artifact's folder"),
        (in_vocabulary(path="/etc/passwd"), "is no path below the artifact's folder"),
        (in_vocabulary(path="train"), "train: not among the files that the manifest lists"),
        (list_no("tokenizer/tokenizer.model"), "tokenizer.model: not among the files that the manifest lists"),
        (list_no(SHARD), f"{SHARD}: not among the files that the manifest lists"),
        (list_no(TAIL), f"{TAIL}: not among the files that the manifest lists"),
        (in_split(shards=["../x", "../x", "../x"]), "is no path below the artifact's folder"),
        (in_split(shards=[SHARD]), "80 rows in 1 shards"),
        (in_split(shards=[SHARD] * 3), f"{SHARD}: named more than once"),
        (
            in_split(shards=[SHARD, "train/shard-00001.arrow", VALIDATION_SHARD]),
            f"{VALIDATION_SHARD}: named more than once",
        ),
        (in_vocabulary(sha256="0" * 64), "tokenizer.model: sha256 000000000000, `files` has "),
        (
            in_split(shards=["train/shard-00001.arrow", SHARD, "train/shard-00002.arrow"]),
            "the shards of train are not in the order of their names",
        ),
        (be_made_of("elsewhere/*.jsonl", 1.0), "made of .*elsewhere.*, its recipe asks for "),
        (be_made_of("pydoc://", 2.0), "made of .*2.0.*, its recipe asks for "),
        (in_split(rows=79, tail_tokens=21), "256 tokens of uint16 in 16 rows, the manifest says 240 of uint16 in 15"),
        (in_split(rows=80, tail_tokens=6, document_tokens=1_178), "the manifest says 6 of uint16 in 1"),
        (in_split(rows=2**70), "rows: Input should be less than"),
        (in_split(rows=-1), "rows: Input should be greater than or equal to 0"),
        (in_corpus(rows_per_shard=80), "80 rows in 3 shards"),
        (in_corpus(sequence_length=0), "sequence_length: Input should be greater than or equal to 1"),
        (in_corpus(token_dtype="uint32"), "tokens of uint16 in 32 rows, the manifest says 512 of uint32 in 32"),
        (in_corpus(splits={}), "its splits are none, expected train and validation"),
        (in_vocabulary(bos_id=300), "BOS 300 or EOS 2 is beyond its 300 ids"),
        (in_vocabulary(vocab_size=290), "and its vocabulary has 290"),
        (in_vocabulary(vocab_size=70_000), "70,000 ids do not fit into uint16"),
        (in_split(documents=1), "1 documents with 54 BOS and 54 EOS"),
        (be_of_one_document, "54 documents begin in its files, the manifest says 1"),
        (in_corpus(documents_with_invalid_utf8=200), "200 of 108 documents with invalid UTF-8"),
        (
            lambda fields: fields["recipe"]["corpus"].update(sequence_length=99),
            "corpus.sequence_length: 16, its recipe",
        ),
        (lambda fields: fields["recipe"]["corpus"].pop("rows_per_shard"), "corpus.rows_per_shard: 32, its recipe asks"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(corpus: Path, change: Change, message: str) -> None:
    forge(corpus, change)

    with pytest.raises(ArtifactError, match=message):
        use(corpus)


def write_rows(path: Path, tokens: pa.Array, starts: list[list[int]], batches: int = 1) -> None:
    rows = pa.FixedSizeListArray.from_arrays(tokens, 16)
    batch = pa.record_batch([rows, pa.array(starts, pa.list_(pa.int32()))], names=["input_ids", "doc_starts"])
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)


DOCUMENTS = -(-512 // DOCUMENT_TOKENS)
"""Documents that begin in the training split's first shard, of 32 rows of 16 tokens."""


def make_starts(rows: int = 32, documents: int = DOCUMENTS) -> list[list[int]]:
    """As many documents as begin in the shard that is replaced, one in each of the first rows."""
    return [[0] if row < documents else [] for row in range(rows)]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: write_rows(path, pa.array([299] * 512, pa.uint16()), make_starts()), None),
        (
            lambda path: write_rows(path, pa.array([300] * 512, pa.uint16()), make_starts()),
            "holds the id 300, and its vocabulary has 300",
        ),
        (
            lambda path: write_rows(path, pa.array([1] * 496, pa.uint16()), make_starts(31)),
            "496 tokens of uint16 in 31 rows, the manifest says 512 of uint16 in 32",
        ),
        (lambda path: write_rows(path, pa.array([1] * 512, pa.int16()), make_starts()), "512 tokens of int16"),
        (lambda path: write_rows(path, pa.array([1.0] * 512), make_starts()), "512 tokens of float64"),
        (lambda path: write_rows(path, pa.array([1] * 511 + [None], pa.uint16()), make_starts()), "cannot be read as"),
        (lambda path: write_rows(path, pa.array([1] * 512, pa.uint16()), make_starts(), 2), "2 record batches"),
        (
            lambda path: write_rows(path, pa.array([1] * 512, pa.uint16()), [[16], *make_starts(31, DOCUMENTS - 1)]),
            "the doc_starts of row 0 do not rise within the row",
        ),
        (
            lambda path: write_rows(path, pa.array([1] * 512, pa.uint16()), [[3, 3], *make_starts(31, DOCUMENTS - 2)]),
            "the doc_starts of row 0 do not rise within the row",
        ),
        (lambda path: path.write_bytes(b"ARROW1\0\0" + bytes(200)), "cannot be read as a corpus's file"),
        (lambda path: path.write_bytes(b""), "cannot be read as a corpus's file"),
    ],
)
def test_a_shard_with_other_content_than_its_manifest_says_is_refused(
    corpus: Path, write: Callable[[Path], None], message: str | None
) -> None:
    write(corpus / SHARD)
    forge(corpus)

    if message is None:
        use(corpus)
        return
    with pytest.raises(ArtifactError, match=message):
        use(corpus)


def verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and messages of `python -m services.common.artifacts verify`."""
    from services.common.artifacts.__main__ import main as artifacts  # noqa: PLC0415

    return exit_code_of(lambda: artifacts(["verify", str(folder)])), capsys.readouterr().err


def test_verify_counts_what_a_corpus_holds(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(corpus, capsys) == (0, "")

    write_rows(corpus / SHARD, pa.array([1] * 496, pa.uint16()), make_starts(31))
    forge(corpus)

    exit_code, told = verify(corpus, capsys)
    assert exit_code == 3
    assert "496 tokens of uint16 in 31 rows" in told


def be_the_shards_vocabulary(fields: dict[str, Any]) -> None:
    """The manifest lists one more file, which is no vocabulary, and takes it for one."""
    other = next(entry for entry in fields["files"] if entry["path"] == "notes.txt")
    in_vocabulary(path=other["path"], sha256=other["sha256"])(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_vocabulary(vocab_size=290), "and its vocabulary has 290"),
        (in_vocabulary(kind="tokenizer_json"), "tokenizer.model is no tokenizer_json vocabulary"),
        (in_vocabulary(kind="tiktoken"), "tokenizer.model: "),
        (be_the_shards_vocabulary, "notes.txt is no sentencepiece vocabulary"),
        (lambda fields: fields.update(identity_key="0" * 64), "has the identity_key 000000000000, its recipe has "),
        (lambda fields: fields["recipe"]["corpus"].update(validation_fraction=0.5), "has the identity_key "),
        (lambda fields: fields["recipe"].update(surprise=1), "has a recipe that this program does not read: surprise"),
        (lambda fields: fields["files"][0].update(sha256="0" * 64), "the manifest says " + "0" * 64),
        (lambda fields: fields.update(name="other"), "its manifest is of other, its recipe is of sentences"),
    ],
)
def test_verify_holds_a_manifest_against_its_vocabulary_and_its_recipe(
    corpus: Path, capsys: pytest.CaptureFixture[str], change: Change, said: str
) -> None:
    (corpus / "notes.txt").write_text("no vocabulary", encoding="utf-8")
    forge(corpus, change)

    exit_code, told = verify(corpus, capsys)

    assert (exit_code, said in told) == (3, True), told


def test_verify_says_where_no_library_reads_the_vocabulary(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)

    exit_code, told = verify(corpus, capsys)

    assert exit_code == 4
    assert "tokenizer.model: this environment cannot read a sentencepiece vocabulary" in told


def test_verify_takes_a_copy_under_a_name_of_ones_own_and_none_under_another_id(
    published: Artifact[CorpusManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("my-copy", "0" * 16):
        shutil.copytree(published.path, tmp_path / name)

    assert verify(tmp_path / "my-copy", capsys) == (0, "")
    exit_code, told = verify(tmp_path / ("0" * 16), capsys)
    assert exit_code == 3
    assert f"its manifest is of {published.manifest.id}: it was copied here from there" in told


def test_the_file_behind_a_link_is_not_mapped(corpus: Path, tmp_path: Path) -> None:
    """Workers map the files without hashing them once more."""
    artifact = open_artifact(corpus, CorpusManifest)
    (corpus / SHARD).rename(tmp_path / "shard")
    (corpus / SHARD).symlink_to(tmp_path / "shard")

    with pytest.raises(ArtifactError, match="a link that leads out of "):
        TokenStream(corpus, artifact.manifest.corpus, "train")


def test_a_corpus_that_lies_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path / "fsx", recipe)
    current = corpus.path.parent / CURRENT
    ((key, _),) = json.loads(current.read_text()).items()

    corpus.path.rename(corpus.path.with_name("f" * 16))
    current.write_text(json.dumps({key: "f" * 16}))
    with pytest.raises(ArtifactError, match=r"its manifest is of sentences/.*: it was copied here from there"):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")

    corpus.path.with_name("f" * 16).rename(corpus.path)
    forge(corpus.path, lambda fields: fields.update(identity_key="0" * 64))
    current.write_text(json.dumps({key: corpus.path.name}))
    with pytest.raises(ArtifactError, match="for a recipe that it was not made for"):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")


@pytest.mark.parametrize(
    "content",
    ["[]", "5", "{", '{"a": "../../x"}', '{"a": 5}', '{"a": ["x"]}', '{"a": "' + "x" * 5_000 + '"}', "[" * 9_999],
)
def test_a_current_json_that_names_no_published_artifact_is_made_anew(tmp_path: Path, content: str) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path / "fsx", recipe)
    shutil.copytree(corpus.path, tmp_path / "x")
    (corpus.path.parent / CURRENT).write_text(content)

    assert open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx").path == corpus.path


@pytest.mark.parametrize("replace", [Path.mkdir, os.mkfifo])
def test_a_current_json_that_is_no_file_is_named(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    recipe = make_recipe(tmp_path)
    current = make_corpus(tmp_path / "fsx", recipe).path.parent / CURRENT
    current.unlink()
    replace(current)

    with pytest.raises(ArtifactError, match=r"current\.json: cannot be read"):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")


@pytest.fixture
def trained(new_job: Callable[..., Job]) -> Job:
    job = new_job(train__max_steps="1", checkpoint__interval_steps="1")
    train(job, ALONE)
    return job


STATE_SHARD = shard_name(0)
NORM = "weight/model.norm.weight[0:16]"


def rewrite_tensors(folder: Path, change: Change) -> None:
    with safetensors.safe_open(folder / STATE_SHARD, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(folder / STATE_SHARD)
    change(tensors)
    (folder / STATE_SHARD).write_bytes(safetensors.torch.save(tensors, metadata))
    forge(folder)


def rename_norm(name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors.pop(NORM)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(NORM),
            "weight/model.norm.weight.0:16. is missing: no file has a slice of this tensor",
        ),
        (rename_norm("weight/model.norm.weight[0:16].flat[0:15]"), "is F32 .16., expected F32 .15."),
        (rename_norm("weight/model.norm.weight[1:17]"), "is no part of the model's model.norm.weight, which is"),
        (rename_norm("weight/model.norm.weight[0:4,0:4]"), "is no part of the model's model.norm.weight, which is"),
        (rename_norm("weight/model.norm.weight[16:0]"), r"'weight/model.norm.weight.16:0.'"),
        (rename_norm("weight/more.weight[0:16]"), "the recipe's model has no parameter more.weight"),
        (rename_norm("model.norm.weight"), "'model.norm.weight' is not the key of a slice"),
        (lambda tensors: tensors.update({NORM: torch.ones(1)}), "is F32 .1., expected F32 .16."),
        (lambda tensors: tensors.update({NORM: torch.ones(16).double()}), "is F64 .16., expected F32 .16."),
        (lambda tensors: tensors.clear(), "embed_tokens.weight.0:300,0:16. is missing(?s:.*)and 53 tensors more"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(
    trained: Job, tmp_path: Path, change: Change, message: str
) -> None:
    folder = trained.checkpoint_address(1).path
    rewrite_tensors(folder, change)
    run = open_run(trained.root, trained.run)

    assert re.search(message, load_part(trained, make_program(trained.recipe).state.read(), step=1))
    for work in (
        lambda: load_model(run),
        lambda: export(run, tmp_path / "exported"),
    ):
        with pytest.raises(ArtifactError, match=message):
            work()


def test_a_file_that_holds_no_tensors_is_refused(trained: Job) -> None:
    (trained.checkpoint_address(1).path / STATE_SHARD).write_bytes(b"\xff" * 100)
    forge(trained.checkpoint_address(1).path)

    assert "cannot be read as safetensors" in load_part(trained, make_program(trained.recipe).state.read(), step=1)
    with pytest.raises(ArtifactError, match=r"all 1 checkpoints are damaged(?s:.*)cannot be read as safetensors"):
        train(trained, ALONE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields["checkpoint"].update(step=2), "comes from another state: step 1, expected 2"),
        (in_all_of_state(step=2), "its manifest says that it is the state after step 2"),
        (lambda fields: fields["checkpoint"].update(step=2**64), "step: Input should be less than"),
        (lambda fields: fields["checkpoint"].update(skipped_steps=2), "2 of 1 steps skipped"),
        (lambda fields: fields.update(id=checkpoint_id(2)), "it was copied here from there"),
        (list_no(STATE_SHARD), "no file: expected shards"),
        (lambda fields: fields["files"][0].update(path="weights.bin"), "weights.bin: expected shards"),
    ],
)
def test_a_checkpoint_that_is_not_what_its_place_says_is_damaged(trained: Job, change: Change, message: str) -> None:
    forge(trained.checkpoint_address(1).path, change)

    with pytest.raises(ArtifactError, match=f"all 1 checkpoints are damaged(?s:.*){message}"):
        newest_checkpoint(trained.checkpoint_collection)


def test_a_checkpoint_that_this_user_may_not_read_is_not_passed_over(
    trained: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be continued from, and this one be removed in the end."""
    newest = trained.checkpoint_address(1).path / STATE_SHARD
    really_open = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == newest:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(UnreadableError, match=r"shard-00000\.safetensors: cannot be read: Permission denied"):
        newest_checkpoint(trained.checkpoint_collection)


def change_run(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_run(paths={"corpus": "../../../x"}), "x: not a published artifact"),
        (change_run(paths={"corpus": "a\0b"}), "cannot be read: no name of a file"),
        (change_run(paths={"corpus": 5}), "damaged, or of another version"),
        (change_run(paths=[]), "damaged, or of another version"),
        (change_run(recipe={}), "damaged, or of another version"),
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "run.json: describes the run small-"),
        (lambda text: "[" * 100_000, "nested deeper than 64"),
        (lambda text: "null", "damaged, or of another version"),
    ],
)
def test_a_run_json_that_is_not_of_its_run_is_refused(trained: Job, change: Callable[[str], str], message: str) -> None:
    path = trained.run_folder / RUN_FILE
    path.write_text(change(path.read_text()))

    with pytest.raises(ArtifactError, match=message):
        open_run(trained.root, trained.run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "nan"], "--temperature nan: expected 0, which takes the likeliest token, or 0.001 or more"),
        (["--temperature", "inf"], "--temperature inf: expected"),
        (["--temperature", "-1"], "--temperature -1.0: expected"),
        (["--temperature", "1e-320"], "--temperature 1e-320: expected"),
        (["--seed", "9" * 30], "expected 0 to 2^63 - 1"),
        (["--seed", "9" * 5_000], "invalid int value"),
        (["--seed", "-1"], "--seed -1: expected 0 to 2^63 - 1"),
        (["--tokens", "-1"], "--tokens -1: expected 0 or more"),
        (["--prompt", "caf\udce9"], "expected UTF-8 without NUL characters"),
        (["--prompt", "a\0b"], "expected UTF-8 without NUL characters"),
        (["--corpus", "a\0b"], "expected UTF-8 without NUL characters"),
    ],
)
def test_a_sample_that_cannot_be_drawn_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    recipe = write_recipe(tmp_path)

    assert exit_code_of(lambda: main(["sample", "--recipe", str(recipe), "--root", str(tmp_path), *options])) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "16 of 16 values are NaN or infinite"), (3e38, "logits that are not finite")]
)
def test_weights_that_compute_nothing_write_nothing(trained: Job, value: float, said: str) -> None:
    rewrite_tensors(trained.checkpoint_address(1).path, lambda tensors: tensors[NORM].fill_(value))

    with pytest.raises(ArtifactError, match=said):
        TextGenerator(open_run(trained.root, trained.run)).generate("a", num_tokens=1, temperature=0.7, seed=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", [None, NxdLayout(1)])
def test_weights_that_are_not_finite_are_exported_where_that_is_asked_for_alone(
    trained: Job, tmp_path: Path, layout: NxdLayout | None, value: float
) -> None:
    rewrite_tensors(trained.checkpoint_address(1).path, lambda tensors: tensors[NORM][:3].fill_(value))
    run = open_run(trained.root, trained.run)

    with pytest.raises(ArtifactError, match=r"model\.norm\.weight: 3 of 16 values are NaN or infinite"):
        export(run, tmp_path / "exported", layout)
    assert not (tmp_path / "exported").exists()

    export(run, tmp_path / "exported", layout, allow_non_finite=True)
    assert (tmp_path / "exported").exists()


def test_an_export_of_weights_that_are_not_finite_ends_with_3_unless_its_flag_is_given(
    trained: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_tensors(trained.checkpoint_address(1).path, lambda tensors: tensors[NORM][:3].fill_(float("nan")))
    command = ["export", "--recipe", str(write_recipe(tmp_path)), "--root", str(trained.root)]
    command += ["--output", str(tmp_path / "exported")]

    assert exit_code_of(lambda: main(command)) == 3
    assert "--allow-non-finite-weights" in capsys.readouterr().err
    assert exit_code_of(lambda: main([*command, "--allow-non-finite-weights"])) == 0


@pytest.mark.parametrize("content", [b"", b"no vocabulary", b'{"added_tokens": 5}'])
def test_a_vocabulary_that_its_library_does_not_take_is_named(trained: Job, content: bytes) -> None:
    folder = trained.corpus.path
    (folder / "tokenizer" / "tokenizer.model").write_bytes(content)
    run = open_run(trained.root, trained.run)
    forge(folder)

    with pytest.raises(ArtifactError, match=r"tokenizer\.model: "):
        TextGenerator(replace(run, corpus=open_artifact(folder, CorpusManifest)))


def test_checkpoints_are_ordered_by_number_beyond_a_hundred_million_steps(tmp_path: Path) -> None:
    recipe, collection = make_recipe(tmp_path), tmp_path / "fsx" / "checkpoint" / "small-00000000"
    steps = [7, 99_999_999, 100_000_000, 100_000_001, 1_000_000_000]
    for step in steps:
        publish_checkpoint(tmp_path / "fsx", recipe, step)

    newest = newest_checkpoint(collection)
    assert newest is not None
    assert newest.manifest.checkpoint.step == 1_000_000_000
    assert list(checkpoints(tmp_path / "fsx")) == [checkpoint_id(step) for step in steps]

    with hold_lease(tmp_path / "run.lock") as held:
        policy = Checkpoint(keep_latest=2)
        discard_old(collection, policy, committed_steps=[1_000_000_000], lease=held.lease, verify=verify_checkpoint)
    assert list(checkpoints(tmp_path / "fsx")) == ["step-100000001", "step-1000000000"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000007", 7),
        ("step-100000000", 100_000_000),
        ("step-000000007", None),
        ("step-7", None),
        ("step-00000007.partial", None),
        ("step-٠٠٠٠٠٠٠٧", None),
        ("step-" + "9" * 5_000, None),
        ("good", None),
    ],
)
def test_a_checkpoints_name_is_its_step(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_compile_cache_is_copied_into_the_nodes_folder_alone(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    cache, _ = publish(job.root, job.recipe)
    copy = Path(shutil.copytree(cache.path, tmp_path / "copy"))
    forge(copy, lambda fields: fields["files"][0].update(path="graphs/../../outside"))
    with pytest.raises(ArtifactError, match="is no path below the artifact's folder"):
        open_artifact(copy, CompileCacheManifest)

    prepare_node(replace(job, cache=cache))
    folder = compile_cache_folder(job)
    copied = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert sorted(map(str, copied)) == ["ab/inner/one.bin", "two.bin"]
