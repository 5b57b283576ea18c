"""An evaluation has the loss of each target of the validation split, in any layout of workers, and changes no run.

The numbers are compared with those of transformers on the exported model, and its tokens with those that pyarrow reads.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.common.artifacts.checkpoint import shard_name
from services.common.artifacts.corpus import SourceCounts
from services.common.artifacts.token_stream import TokenStream
from services.trainer.conversion.export import export
from services.trainer.evaluation.losses import estimate_standard_error
from services.trainer.evaluation.records import read_evaluations
from services.trainer.evaluation.validation import Validation, choose_samples
from services.trainer.job import Job, describe_corpus
from services.trainer.metrics.records import read_metrics
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import make_corpus, make_program, make_recipe
from services.trainer.tests.evaluated import evaluate_here, read_split, target_losses
from services.trainer.tests.runs import call_trainer, checkpoints, file_states, flip_a_bit

pytest.importorskip("transformers")  # in no image, so Pants leaves these tests out

TOKENS = 80 * 16 + 5
"""Tokens of the validation split, the last 5 of them in its tail."""


def test_a_run_evaluates_the_whole_split_before_its_first_and_after_its_last_step(
    evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    first, last = read_evaluations(evaluated_run.run_folder)

    assert (first["step"], last["step"]) == (0, 3)
    assert last["tokens"] == len(transformers_losses) == TOKENS - 1
    assert last["loss"] == pytest.approx(transformers_losses.mean(), abs=1e-5)
    assert last["perplexity"] == pytest.approx(math.exp(transformers_losses.mean()), rel=1e-5)
    assert last["corpus"] == evaluated_run.corpus.id
    untrained = Validation(evaluated_run.recipe, evaluated_run.corpus, None).evaluate(
        make_program(evaluated_run.recipe)
    )
    assert untrained
    assert first["loss"] == untrained.loss > last["loss"] + 0.01
    *others, metrics = read_metrics(evaluated_run.run_folder)
    assert [each["step"] for each in others if "validation_loss" not in each] == [1, 2]
    assert (metrics["validation_loss"], metrics["validation_tokens"]) == (last["loss"], TOKENS - 1)


def test_attention_stays_within_documents_where_the_recipe_says_so(evaluated_run: Job, tmp_path: Path) -> None:
    expected = target_losses(evaluated_run, tmp_path / "model", within_documents=True)
    found = evaluate_here(evaluated_run, train__attention_mask="block_causal")

    assert found.loss == pytest.approx(expected.mean(), abs=1e-5)


def test_bits_per_byte_and_standard_error_are_those_of_the_field(
    evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    """Bits per byte leave out BOS and EOS, the first and the last token of a document, as lm-evaluation-harness does.

    For the standard error, documents are clusters.
    """
    _, begins = read_split(evaluated_run.corpus.path)
    documents = [range(begin, end) for begin, end in pairwise([*begins, TOKENS])]
    text = [position - 1 for document in documents for position in document[1:-1]]
    losses = [transformers_losses[[position - 1 for position in each if position]] for each in documents]
    nats, targets = np.array([each.sum() for each in losses]), np.array([len(each) for each in losses])
    residuals = nats - transformers_losses.mean() * targets
    error = math.sqrt(len(nats) / (len(nats) - 1) * (residuals**2).sum()) / targets.sum()
    counts, found = evaluated_run.corpus.payload.splits["validation"], evaluate_here(evaluated_run)

    assert len(text) == counts.document_tokens
    bits = transformers_losses[text].sum() / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / counts.text_bytes, rel=1e-6)
    assert found.standard_error == pytest.approx(error, rel=1e-5)
    assert found.documents == len(nats)
    assert estimate_standard_error(np.array([21.0]), np.array([7])) is None  # of one document


def test_the_first_token_of_a_document_without_bos_is_one_of_its_text(
    evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    payload, (_, begins) = evaluated_run.corpus.payload, read_split(evaluated_run.corpus.path)
    counts = payload.splits["validation"]
    without = counts.model_copy(update={"bos": 0, "document_tokens": counts.document_tokens + counts.bos})
    vocabulary = payload.vocabulary.model_copy(update={"bos_id": None})
    changed = payload.model_copy(update={"vocabulary": vocabulary, "splits": payload.splits | {"validation": without}})

    found = evaluate_here(evaluated_run, replace(evaluated_run.corpus, payload=changed))

    lasts = {begin - 1 for begin in [*begins, TOKENS]}
    text = [position - 1 for position in range(1, TOKENS) if position not in lasts]
    evaluated_bytes = counts.text_bytes * len(text) / without.document_tokens
    bits = transformers_losses[text].sum() / math.log(2)
    assert len(text) == without.document_tokens - 1  # the first token of the split is no target
    assert found.bits_per_byte == pytest.approx(bits / evaluated_bytes, rel=1e-6)


def test_a_source_has_the_mean_of_its_own_documents(
    evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    """Three sources, two of them with one uri, and the last one without validation documents."""
    _, begins = read_split(evaluated_run.corpus.path)
    payload, border = evaluated_run.corpus.payload, begins[20]
    none = dict.fromkeys(("share", "validation_ngrams", "validation_ngrams_in_train", "documents_duplicate"), 0)

    def source(uri: str, documents: int, tokens: int) -> SourceCounts:
        counts = {"train": {"documents": 0, "tokens": 0, "text_bytes": 0}}
        counts["validation"] = {"documents": documents, "tokens": tokens, "text_bytes": 1000}
        return SourceCounts.model_validate({"uri": uri, "weight": 1.0, "splits": counts, **none})

    sources = (source("a", 20, border), source("b", len(begins) - 20, TOKENS - border), source("a", 0, 0))
    changed = payload.model_copy(update={"sources": sources})
    found = evaluate_here(evaluated_run, replace(evaluated_run.corpus, payload=changed)).sources

    assert list(found) == ["a (1)", "b"]
    assert (found["a (1)"].tokens, found["b"].tokens) == (border - 1, TOKENS - border)
    assert found["a (1)"].loss == pytest.approx(transformers_losses[: border - 1].mean(), abs=1e-5)
    assert found["b"].loss == pytest.approx(transformers_losses[border - 1 :].mean(), abs=1e-5)


def test_a_bounded_evaluation_takes_the_same_rows_from_all_of_the_split(
    evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    payload = evaluated_run.corpus.payload
    stream = TokenStream(evaluated_run.corpus.path, payload, "validation")
    samples = choose_samples(stream, 10 * 16 - 3)  # rounded up to 10 rows of 16 targets
    rows = np.concatenate([transformers_losses[sample * 16 : sample * 16 + 16] for sample in samples])

    found = [
        evaluate_here(evaluated_run, tokens=10 * 16 - 3, batch__micro_batch_size=size, batch__global_batch_size="8")
        for size in ("2", "4")
    ]
    assert samples[0] < 20 < 60 < samples[-1]
    assert all(each.loss == pytest.approx(rows.mean(), abs=1e-5) for each in found)
    assert {each.tokens for each in found} == {160}
    assert len(choose_samples(stream, 10**9)) == 81


@pytest.mark.parametrize(("rows", "tail_tokens", "num_targets"), [(0, 0, 0), (0, 9, 8), (1, 0, 15), (3, 1, 48)])
def test_a_split_of_any_size_has_one_loss_for_each_target(
    tmp_path: Path, rows: int, tail_tokens: int, num_targets: int
) -> None:
    recipe = make_recipe(tmp_path, batch__micro_batch_size="4")
    corpus = make_corpus(tmp_path, recipe, rows, tail_tokens=tail_tokens)
    validation = Validation(recipe, describe_corpus(corpus), None)
    assert validation.is_empty == (num_targets == 0)
    if num_targets:
        tokens, _ = read_split(corpus.path)
        stream = TokenStream(corpus.path, corpus.manifest.corpus, "validation")
        padded = stream.read(np.arange(stream.num_padded_samples))[:, 1:].flatten()

        evaluation = validation.evaluate(make_program(recipe))
        assert evaluation
        assert evaluation.tokens == num_targets == len(tokens) - 1
        assert padded[:num_targets].tolist() == tokens[1:].tolist()
        assert not padded[num_targets:].any()


WHOLE = ("--train.max_steps=3", "--train.evaluation_tokens=1000000")
ONE = "--parallel.data_parallel_size=1"


def call(
    capfd: pytest.CaptureFixture[str], job: Job, *options: str, root: Path | None = None, command: str = "evaluate"
) -> tuple[int, str]:
    recipe = job.root.parent / "small.toml"
    launch = ("--launch=inline",) if command != "import" else ()
    return call_trainer(capfd, recipe, root or job.root, *launch, *WHOLE, *options, command=command)


def evaluate(capfd: pytest.CaptureFixture[str], job: Job, *options: str, root: Path | None = None) -> dict[str, Any]:
    exit_code, output = call(capfd, job, "--json", *options, root=root)
    assert exit_code == 0, output
    record: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return record


def test_every_layout_of_workers_gives_the_loss_of_transformers(
    capfd: pytest.CaptureFixture[str], evaluated_run: Job, transformers_losses: npt.NDArray[np.float64]
) -> None:
    """Any number of workers gives the same bits, which are those of the run's own last evaluation."""
    before = file_states(evaluated_run.root)
    one, four = (
        evaluate(capfd, evaluated_run, f"--parallel.data_parallel_size={workers}")["loss"] for workers in (1, 4)
    )
    split = evaluate(capfd, evaluated_run, ONE, "--parallel.tensor_parallel_size=2")

    assert one == four == read_evaluations(evaluated_run.run_folder)[-1]["loss"]
    assert one == pytest.approx(transformers_losses.mean(), abs=1e-5)
    assert split["loss"] == pytest.approx(transformers_losses.mean(), abs=1e-5)
    assert split["tokens"] == len(transformers_losses)
    assert (split["run"], split["step"]) == (evaluated_run.run, 3)
    part = evaluate(capfd, evaluated_run, ONE, "--tokens=160", "--step=3")
    assert (part["tokens"], part["loss"] != one) == (160, True)
    assert file_states(evaluated_run.root) == before


def test_another_text_is_evaluated_with_the_same_vocabulary_alone(
    capfd: pytest.CaptureFixture[str], evaluated_run: Job, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path)
    same = make_corpus(tmp_path / "same", recipe, rows=10)
    other = make_corpus(tmp_path / "other", recipe, kind="tokenizer_json")

    record = evaluate(capfd, evaluated_run, ONE, f"--corpus={same.path}")
    assert record["corpus_path"] == str(same.path)
    assert record["tokens"] == 10 * 16 + 4
    exit_code, output = call(capfd, evaluated_run, ONE, f"--corpus={other.path}")
    assert (exit_code, other.manifest.corpus.vocabulary.sha256[:12] in output) == (3, True), output


def test_imported_weights_are_evaluated_before_a_step_by_the_command_and_by_the_run(
    capfd: pytest.CaptureFixture[str], evaluated_run: Job, tmp_path: Path
) -> None:
    folder, root = export(open_run(evaluated_run.root, evaluated_run.run), tmp_path / "model"), tmp_path / "fsx"
    shutil.copytree(evaluated_run.root / "corpus", root / "corpus")
    _, printed = call(capfd, evaluated_run, f"--from={folder}", root=root, command="import")
    found = re.search(r'initial_weights = "([0-9a-f]{64})"', printed)
    assert found, printed
    named = f"--train.initial_weights={found[1]}"
    assert call(capfd, evaluated_run, f"--from={folder}", named, root=root, command="import")[0] == 0

    loss = evaluate(capfd, evaluated_run, ONE, root=root)["loss"]
    assert loss == read_evaluations(evaluated_run.run_folder)[-1]["loss"]
    assert call(capfd, evaluated_run, ONE, named, root=root, command="train")[0] == 0
    (run_folder,) = root.glob("run/*/")
    first = read_evaluations(run_folder)[0]
    assert (first["step"], first["loss"]) == (0, loss)


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--checkpoint={damaged}",), 3, shard_name(0)),
        (("--tokens=0",), 2, "--tokens"),
        (("--step=7",), 3, "--step=3"),
        (("--step=3", "--checkpoint=x"), 2, "--checkpoint"),
        (("--checkpoint={checkpoint}", "--model.rope_theta=500000.0"), 3, "model.rope_theta"),
        (("--checkpoint=nowhere",), 3, "nowhere"),
    ],
)
def test_a_wrong_request_is_refused(
    capfd: pytest.CaptureFixture[str],
    evaluated_run: Job,
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    named: str,
) -> None:
    checkpoint = checkpoints(evaluated_run.root)["step-00000003"]
    damaged = shutil.copytree(checkpoint, tmp_path / "step-00000003")
    flip_a_bit(damaged / shard_name(0))

    filled = (option.format(checkpoint=checkpoint, damaged=damaged) for option in options)
    exit_code, output = call(capfd, evaluated_run, ONE, *filled)

    assert (exit_code, named in output) == (code, True), output
