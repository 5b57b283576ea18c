"""Runs on several published corpora: exact shares at every step, the same bits for any workers, and no text read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.artifacts.corpus import SPLITS, VocabularyKind, shard_path
from services.common.artifacts.upstream import open_corpora
from services.common.errors import ArtifactError, RecipeError, WorkersLost
from services.common.program.fingerprint import program_facts
from services.common.program.mesh import Mesh
from services.common.recipe.derived import check_epochs
from services.common.recipe.schema import fingerprint, identity
from services.common.testing.file_opens import noticing_opens
from services.trainer.__main__ import main
from services.trainer.command_inputs import new_job
from services.trainer.data import batch_samples, sample_indices
from services.trainer.evaluation.losses import Evaluation
from services.trainer.evaluation.validation import Validation
from services.trainer.job import Job, describe_corpora
from services.trainer.mixture import count_taken, open_mixture, order_corpora
from services.trainer.runs.branch import find_starts
from services.trainer.runs.description import write_run
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.tests import work
from services.trainer.tests.builders import make_corpus, make_program, make_recipe, train_here
from services.trainer.tests.evaluated import evaluate_here
from services.trainer.tests.runs import state_hash

ROWS = {"sentences": 80, "code": 30}
Mix = Callable[..., Job]


@pytest.fixture
def mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mix:
    """Describe a run on the corpora `sentences` and `code`; overrides as `train__max_steps="7"`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, rows in ROWS.items():
        make_corpus(tmp_path / "fsx", make_recipe(tmp_path, corpus__name=name), rows)

    def build(mixture: str = "{sentences = 3, code = 1}", **overrides: str) -> Job:
        recipe = make_recipe(tmp_path, train__mixture=mixture, **{"train__max_steps": "6", **overrides})
        corpora = open_corpora(recipe, tmp_path / "small.toml", tmp_path / "fsx")
        program = fingerprint(program_facts(recipe))
        job = new_job(tmp_path / "fsx", recipe, describe_corpora(recipe, corpora), None, program)
        write_run(job)
        return job

    return build


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_of_a_run_has_each_share_within_one_sample(seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = tuple(random.integers(1, 60, random.integers(1, 9)).tolist()) if seed else (9_000, *[1] * 100)
    total = sum(weights)
    order = np.concatenate([order_corpora(weights)] * 2)
    counts = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    lengths = np.arange(1, 2 * total + 1)
    assert np.all(np.abs(counts * total - lengths[:, None] * np.array(weights)) < total)
    for number in random.integers(1, 2 * total, 5).tolist():
        far = count_taken(weights, number + total * 10**9) - np.array(weights) * 10**9
        assert far.tolist() == counts[number - 1].tolist()


def test_each_corpus_runs_through_its_own_epochs_as_it_does_alone(mix: Mix) -> None:
    job = mix()
    mixture, seed = open_mixture(job.corpus, "train"), job.recipe.train.data_seed
    drawn = mixture.draw(seed, 0, 400)
    places = [mixture.locate(index) for index in drawn.tolist()]
    for number, (part, count) in enumerate(zip(job.corpus.parts, (300, 100), strict=True)):
        own = [index for corpus, index in places if corpus == number]
        assert own == sample_indices(part.payload.num_samples("train"), seed, 0, count).tolist()
    meshes = [Mesh(rank, 2) for rank in range(2)]
    batches = [batch_samples(mixture, job.recipe, batch, mesh, 0) for batch in range(50) for mesh in meshes]
    assert np.concatenate(batches).tolist() == drawn.tolist()
    warning = check_epochs(mix(train__max_steps="61").recipe, job.corpus.payloads)
    assert "the corpus sentences 4.6 times" in warning  # 61 * 8 * 3 / 4 of 80 samples


def test_a_killed_run_has_the_same_bits_with_other_workers_and_a_loss_of_each_corpus(mix: Mix) -> None:
    whole = {"train__max_steps": "8", "train__evaluation_tokens": "1000000", "checkpoint__interval_steps": "4"}
    job = mix(**whole)
    with pytest.raises(WorkersLost):
        work.run_group(work.train_and_die, job, 2, job.run_folder)
    train_here(job)  # from step 4 on, by one worker
    ended = state_hash(job.checkpoint_address(8).path)
    job.checkpoint_collection.rename(job.root / "killed")
    train_here(job)
    assert state_hash(job.checkpoint_address(8).path) == ended

    run = open_run(job.root, job.run)
    both, alone = run.evaluations[-1], {part.name: evaluate_here(job, part) for part in job.corpus.parts}
    assert {name: mean["loss"] for name, mean in both["sources"].items()} == {
        name: pytest.approx(each.loss, abs=1e-12) for name, each in alone.items()
    }
    assert both["loss"] == pytest.approx(sum(each.loss * each.tokens for each in alone.values()) / both["tokens"])
    assert both["bits_per_byte"] == pytest.approx(alone["code"].bits_per_byte, rel=0.1)
    assert summarize(run).count("\ntokenizer ") == 2


@pytest.mark.parametrize("empty", ["a", "b", "c", "ab", "bc"])
def test_a_corpus_without_a_validation_document_changes_no_number_of_the_others(tmp_path: Path, empty: str) -> None:
    for name, rows in {"a": 13, "b": 8, "c": 20}.items():
        splits = SPLITS[:1] if name in empty else SPLITS
        make_corpus(tmp_path / "fsx", make_recipe(tmp_path, corpus__name=name), rows, splits=splits)
    recipe = make_recipe(tmp_path, corpus__name="a", train__mixture="{a = 1, b = 1, c = 1}")
    corpora = open_corpora(recipe, tmp_path / "small.toml", tmp_path / "fsx")

    def evaluate(names: str) -> Evaluation:
        corpus = describe_corpora(recipe, {name: corpora[name] for name in names})
        found = Validation(recipe, corpus, None).evaluate(make_program(recipe))
        assert found
        return replace(found, seconds=0.0)

    left = "".join(sorted(set("abc") - set(empty)))
    found, alone = evaluate("abc"), {name: vars(evaluate(name)) for name in left}
    assert found.sources.keys() == alone.keys()
    for name, mean in found.sources.items():
        assert vars(mean) == pytest.approx({field: alone[name][field] for field in vars(mean)}, rel=1e-12)
    if len(left) > 1:
        assert found == evaluate(left)
    else:
        assert found.bits_per_byte == pytest.approx(alone[left]["bits_per_byte"], rel=1e-12)


def test_compared_runs_with_other_validation_text_show_their_losses_by_corpus(
    mix: Mix, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"train__max_steps": "1", "train__evaluation_tokens": "1000000"}
    both, other_weights, one = (mix(f"{{sentences = {each}}}", **short) for each in ("3, code = 1", "1, code = 1", "1"))
    for job in (both, other_weights, one):
        train_here(job)

    def compare(*jobs: Job) -> dict[str, list[str]]:
        names = [job.run for job in jobs]
        assert main(["compare", "--root", str(both.root), *names]) == 0
        rows = re.findall(
            r"^(sentences|code)/\w+, [\d,]+ tokens +(\S+) +(\S+) *$", capsys.readouterr().out, re.MULTILINE
        )
        return {name: losses for name, *losses in rows}

    assert compare(both, other_weights) == {}
    mixed, alone = (open_run(both.root, job.run).evaluations[-1] for job in (both, one))
    assert compare(both, one) == {
        "sentences": [f"{mixed['sources']['sentences']['loss']:.4f}", f"{alone['loss']:.4f}"],
        "code": [f"{mixed['sources']['code']['loss']:.4f}", "-"],
    }
    assert "Validation loss by corpus" in (both.root / "run/comparison.html").read_text()


def test_other_weights_are_another_run_of_which_no_text_and_no_row_is_read(mix: Mix, tmp_path: Path) -> None:
    """A corpus costs a command its manifest, and a step the files of its rows; a flipped byte in one is named."""
    jobs = [mix(), mix("{sentences = 6, code = 2}")]
    with noticing_opens(tmp_path / "fsx/corpus") as opens:
        other = mix("{sentences = 1, code = 1}")
        assert [path.name for path in opens.paths if path.name != "current.json"] == ["manifest.json"] * 2
        seen, mixture = len(opens.paths), open_mixture(other.corpus, "train")
        assert len(opens.paths) == seen
        mixture.read(mixture.draw(0, 0, 64))
        assert len(opens.paths[seen:]) == len(set(opens.paths[seen:])) <= 3 + 2
    shard = other.corpus.parts[1].path / shard_path("train", 0)
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{shard}.*damaged"):
        mixture.read(mixture.draw(0, 0, 120))
    assert jobs[0].run == jobs[1].run != other.run
    assert "train.mixture" not in identity(make_recipe(tmp_path), "checkpoint")


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("{code = 1}", "not the recipe's own corpus .*: give sentences a weight"),
        ("{sentences = 1, code = 19999}", "sum to 20,000 in lowest terms"),
        ("{sentences = 1, code = 0}", "greater than 0"),
        ("{sentences = 1, none = 1}", "'none' .*not published"),
        ("{sentences = 1, ids = 1}", "vocabulary [0-9a-f]{12}, and .*sentences/.* has [0-9a-f]{12}"),
        ("{sentences = 1, long = 1}", "its rows have 32 tokens"),
        ("{sentences = 1, twice = 1}", "name one as twice/ID"),
        ("{sentences = 1, copy = 1}", "has it twice"),
    ],
)
def test_what_cannot_be_mixed_is_refused(mix: Mix, tmp_path: Path, mixture: str, expected: str) -> None:
    others: tuple[tuple[str, int, VocabularyKind, dict[str, str]], ...] = (
        ("ids", 30, "tokenizer_json", {}),
        ("long", 30, "sentencepiece", {"corpus__sequence_length": "32"}),
        ("twice", 30, "sentencepiece", {}),
        ("twice", 30, "sentencepiece", {"corpus__min_document_bytes": "1"}),
        ("copy", 80, "sentencepiece", {}),
    )
    for name, rows, kind, changes in others:
        make_corpus(tmp_path / "fsx", make_recipe(tmp_path, corpus__name=name, **changes), rows, kind)
    with pytest.raises((ArtifactError, RecipeError), match=f"(?s){expected}"):
        mix(mixture)


def test_of_corpora_of_one_name_the_only_one_that_goes_with_the_first_is_mixed(mix: Mix, tmp_path: Path) -> None:
    """After a change of the recipe `code` has three ids, of which one has the first's vocabulary and length of rows."""
    changes: tuple[tuple[VocabularyKind, dict[str, str]], ...] = (
        ("sentencepiece", {"corpus__sequence_length": "32"}),
        ("tokenizer_json", {"corpus__min_document_bytes": "1"}),
    )
    for kind, overrides in changes:
        make_corpus(tmp_path / "fsx", make_recipe(tmp_path, corpus__name="code", **overrides), 30, kind)
    collection = tmp_path / "fsx/corpus/code"
    assert len(list(collection.glob("*/manifest.json"))) == 3

    mixed = mix().corpus.parts[1]

    assert mixed.payload.vocabulary.sha256 == mix("{sentences = 1}").corpus.payload.vocabulary.sha256
    assert mixed.payload.sequence_length == 16


def test_a_branch_goes_on_in_each_corpus_and_with_the_same_mixture_as_its_parent(mix: Mix) -> None:
    """And it begins a corpus that its ancestors have not seen, or that it starts again."""
    equal, two_to_one = "{sentences = 1, code = 1}", "{sentences = 2, code = 1}"
    quick = {"train__evaluation_tokens": "0"}
    parent = mix(two_to_one, train__max_steps="2", **quick)
    train_here(parent)  # 16 samples: 11 and 5

    def drawn(job: Job, step: int) -> list[list[int]]:
        starts = find_starts(job.lineage.ancestors, job.recipe, job.corpus.content_digests)
        mixture = open_mixture(job.corpus, "train", starts=starts)
        first = job.lineage.data_offset_samples + step * 8
        places = [mixture.locate(index) for index in mixture.draw(0, first, 12).tolist()]
        return [[own for corpus, own in places if corpus == number] for number in range(len(job.corpus.parts))]

    def expected(sentences: int, code: int) -> list[list[int]]:
        return [sample_indices(rows, 0, first, 6).tolist() for rows, first in ((80, sentences), (30, code))]

    branch = f'{{ run = "{parent.run}", step = 2 }}'
    assert drawn(mix(two_to_one, train__branch=branch), 2) == drawn(parent, 2)
    other = mix(equal, train__branch=branch, train__max_steps="4", **quick)
    assert drawn(other, 2) == expected(11, 5)
    train_here(other)
    later = f'{{ run = "{other.run}", step = 4 }}'
    assert drawn(mix(equal, train__branch=later), 4) == expected(19, 13)
    again = mix(equal, train__branch=later.replace(" }", ', data = "restart" }'))
    assert drawn(again, 4) == expected(0, 0)
    alone = mix("{sentences = 1}", train__branch=branch)
    assert alone.lineage.data_offset_samples == 11 - 16
