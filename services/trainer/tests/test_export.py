"""A checkpoint is exported as a Hugging Face folder with the same logits, and generates text."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from services.common.artifacts.checkpoint import shard_name
from services.common.artifacts.corpus import VocabularyKind
from services.common.errors import ArtifactError, RecipeError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.llama import parameter_shapes
from services.common.testing.disks import mounted
from services.common.vocabularies.codec import load_codec
from services.trainer.checkpoints.lookup import open_checkpoint
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.conversion.export import PROVENANCE, export
from services.trainer.conversion.hugging_face import WEIGHTS
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.inspection.sample import TextGenerator, load_model, load_weights
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.runs.run import open_run, vocabulary_file
from services.trainer.tests.builders import LLAMA_3_1
from services.trainer.tests.runs import call_trainer, flip_a_bit

ALONE = WorkerEnvironment(rank=0, world_size=1)


@pytest.fixture(scope="module")
def trained(new_shared_job: Callable[..., Job]) -> Job:
    """A run of one step."""
    job = new_shared_job(train__max_steps="1")
    train(job, ALONE)
    return job


@pytest.mark.parametrize("shape", [{}, LLAMA_3_1, {"model__tie_word_embeddings": "true"}], ids=["2", "3.1", "tied"])
def test_an_exported_folder_gives_the_same_logits_through_from_pretrained(
    tmp_path: Path, new_job: Callable[..., Job], shape: dict[str, str]
) -> None:
    job = new_job(train__max_steps="1", **shape)
    train(job, ALONE)
    run = open_run(job.root, job.run)
    folder = export(run, tmp_path / "hugging-face")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens_BS = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(theirs(tokens_BS).logits, load_model(run).logits(tokens_BS))
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (1, 2)
    ids = load_codec(vocabulary_file(run), run.corpus.manifest.corpus.vocabulary).encode("sentence 1 </s>")
    assert transformers.AutoTokenizer.from_pretrained(folder)("sentence 1 </s>").input_ids == [1, *ids]


def test_a_large_model_is_exported_in_several_files_and_an_index(
    trained: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.conversion.hugging_face.FILE_ELEMENTS", 5_000)
    run = open_run(trained.root, trained.run)
    folder = export(run, tmp_path / "hugging-face")

    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in load_weights(run).items())


def test_an_average_is_the_mean_of_the_last_checkpoints_and_names_them(
    tmp_path: Path, new_job: Callable[..., Job]
) -> None:
    job = new_job(train__max_steps="4", checkpoint__interval_steps="1", checkpoint__keep_latest="3")
    train(job, ALONE)
    run = open_run(job.root, job.run)
    folder = export(run, tmp_path / "mean", average_last=3)

    kept = [open_checkpoint(job.checkpoint_collection, step) for step in (2, 3, 4)]
    shapes = parameter_shapes(run.recipe.model)
    parts = [ShardReader(checkpoint, shapes).read_weights(shapes) for checkpoint in kept]
    exported = safetensors.torch.load_file(folder / WEIGHTS)
    for name, weight in exported.items():
        assert torch.equal(weight, torch.stack([part[name].double() for part in parts]).mean(0).float()), name
    assert not torch.equal(exported["model.norm.weight"], parts[-1]["model.norm.weight"])
    assert json.loads((folder / PROVENANCE).read_text()) == {
        "run": job.run,
        "checkpoints": [
            {"step": each.manifest.checkpoint.step, "content_digest": each.manifest.content_digest} for each in kept
        ],
    }
    with pytest.raises(ArtifactError, match="2, 3, 4"):
        export(run, tmp_path / "more", average_last=4)
    flip_a_bit(kept[0].path / shard_name(0))
    with pytest.raises(ArtifactError, match="step-00000002"):
        export(run, tmp_path / "damaged", average_last=3)
    assert not (tmp_path / "damaged").exists()


def test_requests_that_cannot_be_exported_are_refused(
    trained: Job, tmp_path: Path, new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError, match=tmp_path.name):
        export(open_run(trained.root, trained.run), tmp_path)
    nxd = ("--format=nxd", "--tensor-parallel-size=1")
    for root, options, code in (
        (trained.root, ("--average-last=0",), 2),
        (trained.root, ("--average-last=2", *nxd), 2),
        (new_job().root, (), 3),  # has no checkpoint
    ):
        output = f"--output={tmp_path / 'x'}"
        recipe = trained.root.parent / "small.toml"
        assert call_trainer(capfd, recipe, root, output, *options, command="export")[0] == code
        assert not (tmp_path / "x").exists()


def test_a_full_disk_keeps_nothing_of_an_export(trained: Job, tmp_path: Path) -> None:
    run = open_run(trained.root, trained.run)
    for number, layout in enumerate((None, NxdLayout(1))):
        with mounted(tmp_path / str(number), "64k") as disk:
            with pytest.raises(OSError, match="No space") as full:
                export(run, disk / "model", layout)
            assert (full.value.errno, list(disk.iterdir())) == (errno.ENOSPC, [])


@pytest.mark.parametrize(
    ("kind", "vocab_size"), [("sentencepiece", "300"), ("tokenizer_json", "300"), ("tiktoken", "512")]
)
def test_a_sample_continues_the_prompt_and_is_the_same_for_the_same_seed(
    new_job: Callable[..., Job], kind: VocabularyKind, vocab_size: str
) -> None:
    job = new_job(
        kind=kind, train__max_steps="1", model__vocab_size=vocab_size, tokenizer__train__vocab_size=vocab_size
    )
    train(job, ALONE)
    run = open_run(job.root, job.run)
    prompt = "sentence 1 </s><|end_of_text|>"  # typed, so no end
    writer = TextGenerator(run)
    texts = [writer.generate(prompt, num_tokens=30, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0].startswith(prompt)
    assert texts[0] == texts[1] != texts[2]
