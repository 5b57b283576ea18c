"""Builds small real inputs for the trainer's tests: a recipe of a few thousand parameters and a corpus."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
import tokenizers

from services.common.artifacts.corpus import (
    SPLITS,
    CorpusManifest,
    Split,
    SplitCounts,
    Vocabulary,
    VocabularyKind,
    arrow_schema,
    shard_path,
    tail_path,
)
from services.common.artifacts.corpus_rows import check_rows, digest_checks
from services.common.artifacts.store import Address, Artifact, Draft, Workspace, artifact_id, publish_once
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.fingerprint import program_facts
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.common.recipe.schema import Recipe, fingerprint
from services.common.testing import recipes
from services.common.testing.corpora import corpus_payload
from services.trainer.command_inputs import new_job
from services.trainer.job import Job, describe_corpus
from services.trainer.loop import train
from services.trainer.runs.description import write_run

ALONE = WorkerEnvironment(rank=0, world_size=1)
NewJob = Callable[..., Job]
"""Builds a job on a corpus, with overrides as `train__max_steps="7"`: see the fixture `new_job`."""
SMALL: dict[str, Any] = {
    "corpus__rows_per_shard": 32,
    "corpus__validation_fraction": 0.1,
    "parallel__data_parallel_size": 2,
    "batch__loss_chunk_tokens": 16,
    "compile__enabled": False,
    "train__evaluation_interval_steps": 10,
    "train__evaluation_tokens": 64,
    "checkpoint__interval_steps": 5,
}
"""Additions to the small recipe: two workers, evaluations and checkpoints."""


LLAMA_3_1 = {
    "model__rope_theta": "500000.0",
    "model__rope_scaling": "{factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, "
    "original_max_position_embeddings = 8}",
}
"""Overrides for the rope scaling of Llama 3.1, with fewer original positions than a row of the small recipe."""
QWEN_3 = {
    "model__qk_norm": "true",
    "model__head_dim": "12",
    "model__rms_norm_eps": "1e-6",
    "model__rope_theta": "1e6",
    "model__tie_word_embeddings": "true",
}
"""Overrides for a small Qwen3, whose heads are together wider than the hidden states."""
DOCUMENT_TOKENS = 24
"""Tokens of each document, so that rows of 16 tokens have a document's begin at 0, at 8, or none."""


def write_recipe(folder: Path) -> Path:
    return recipes.write_recipe(folder, **SMALL)


def make_recipe(folder: Path, **overrides: str) -> Recipe:
    """The small recipe; overrides as `train__max_steps="7"`."""
    return recipes.load_with(write_recipe(folder), **overrides)


def make_program(recipe: Recipe) -> Program:
    """The program of a run's only worker."""
    return Program(recipe, TorchNative(Mesh(0, data_parallel_size=1), 1, recipe.train.reduction))


def make_job(root: Path, recipe: Recipe, corpus: Artifact[CorpusManifest]) -> Job:
    """Make a job for eager training in this process."""
    program = fingerprint(program_facts(recipe))
    job = new_job(root, recipe, describe_corpus(corpus), None, program)
    write_run(job)
    return job


@contextmanager
def building_jobs(folder: Path) -> Iterator[NewJob]:
    def build(root: str = "a", kind: VocabularyKind = "sentencepiece", **overrides: str) -> Job:
        recipe = make_recipe(folder, **overrides)
        return make_job(folder / root, recipe, make_corpus(folder / root, recipe, kind=kind))

    with pytest.MonkeyPatch.context() as patch:
        # The node-local folder, which the command would remove: of this process, and of workers that it starts.
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield build


def train_here(job: Job) -> None:
    """Train with one worker, in this process."""
    train(job, ALONE)


def train_new(build: NewJob, *root: str, **overrides: str) -> Job:
    """Build a job by `new_job` or `new_shared_job`, and train it in this process."""
    job = build(*root, **overrides)
    train_here(job)
    return job


def make_corpus(
    root: Path,
    recipe: Recipe,
    rows: int = 80,
    kind: VocabularyKind = "sentencepiece",
    tail_tokens: int = 5,
    splits: Collection[Split] = SPLITS,
) -> Artifact[CorpusManifest]:
    """Publish a corpus of `rows` rows and a tail in each of `splits`; another split is empty. Its tokens count upwards
    in small steps: something to learn.
    """

    def fill(workspace: Workspace) -> Draft:
        vocabulary = _write_vocabulary(workspace.files, kind, recipe.model.vocab_size)
        sizes = {split: (rows, tail_tokens) if split in splits else (0, 0) for split in SPLITS}
        counted = {split: _write_split(workspace.files, split, recipe, *size) for split, size in sizes.items()}
        if vocabulary.bos_id is None:  # the token in its place is one of the document's
            for split, counts in counted.items():
                change = {"bos": 0, "document_tokens": counts.document_tokens + counts.bos}
                counted[split] = counts.model_copy(update=change)
        payload = corpus_payload(
            vocabulary,
            counted,
            sequence_length=recipe.corpus.sequence_length,
            rows_per_shard=recipe.corpus.rows_per_shard,
            token_dtype="uint16" if recipe.model.vocab_size <= 2**16 else "uint32",
        )
        return Draft(payload)

    address = Address(root, "corpus", recipe.corpus.name, artifact_id(recipe, "corpus", 1, []))
    return publish_once(address, CorpusManifest, "tokenizer", recipe, fill)[0]


def _write_split(folder: Path, split: Split, recipe: Recipe, rows: int, tail_tokens: int) -> SplitCounts:
    length, rows_per_shard = recipe.corpus.sequence_length, recipe.corpus.rows_per_shard
    steps = np.random.default_rng(SPLITS.index(split)).integers(1, 3, rows * length + tail_tokens)
    tokens = np.cumsum(steps) % recipe.model.vocab_size
    tokens = tokens.astype("uint16" if recipe.model.vocab_size <= 2**16 else "uint32")
    starts = [
        [at for at in range(length) if (row * length + at) % DOCUMENT_TOKENS == 0 and row * length + at < len(tokens)]
        for row in range(rows + 1)
    ]
    (folder / split / "tail").mkdir(parents=True, exist_ok=True)
    digests: list[str] = []
    for first in range(0, rows, rows_per_shard):
        end = min(rows, first + rows_per_shard)
        part = tokens[first * length : end * length].reshape(-1, length)
        digests.append(write_rows(folder / shard_path(split, len(digests)), split, first, part, starts[first:end]))
    tail = tokens[np.newaxis, rows * length :]
    digests.append(write_rows(folder / tail_path(split), split, rows, tail, starts[rows:]))
    documents = -(-len(tokens) // DOCUMENT_TOKENS)
    return SplitCounts(
        documents=documents,
        text_bytes=3 * len(tokens),
        document_tokens=len(tokens) - 2 * documents,
        bos=documents,
        eos=documents,
        rows=rows,
        tail_tokens=tail_tokens,
        check_digests=tuple(digests),
    )


def write_rows(
    path: Path, split: Split, first_row: int, ids_RL: np.ndarray, doc_starts: Sequence[Sequence[int]]
) -> str:
    """Write a shard or tail of a corpus, in which documents begin at these positions of the rows, with checks that fit;
    return the digest of its checks.
    """
    ids_type = arrow_schema(str(ids_RL.dtype), ids_RL.shape[1]).field("input_ids").type
    if path.name == "tail.arrow":
        ids_type = pa.list_(ids_type.value_type)
    ids = pa.array(list(ids_RL), ids_type)
    starts = pa.array(doc_starts, pa.list_(pa.int32()))
    checks = check_rows(split, first_row, ids_RL, starts.offsets.to_numpy(), starts.values.to_numpy())
    batch = pa.record_batch([ids, starts, pa.array(checks)], names=["input_ids", "doc_starts", "check"])
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return digest_checks(checks)


def _write_vocabulary(folder: Path, kind: VocabularyKind, vocab_size: int) -> Vocabulary:
    """Write a vocabulary of 200 sentences. A tiktoken file has only bytes as tokens, and 256 special tokens; the
    tokenizer of Hugging Face has no BOS.
    """
    sentences = [f"sentence {n} of a small text about {n * 7} words" for n in range(200)]
    match kind:
        case "sentencepiece":
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                num_threads=1,
                minloglevel=2,
            )
            name, content, bos_id, eos_id = "tokenizer.model", model.getvalue(), 1, 2
        case "tokenizer_json" | "hugging_face":
            tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = tokenizers.decoders.ByteLevel()
            trainer = tokenizers.trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
                initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            tokenizer.train_from_iterator(sentences, trainer)
            name, content, bos_id, eos_id = "tokenizer.json", tokenizer.to_str().encode(), 0, 1
        case "tiktoken":
            ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
            name, content, bos_id, eos_id = "tokenizer.tiktoken", ranks.encode(), 256, 257
    path = folder / "tokenizer" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if kind == "hugging_face":
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
        (path.parent / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Vocabulary(
        kind=kind,
        path=f"tokenizer/{name}",
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=vocab_size,
        bos_id=None if kind == "hugging_face" else bos_id,
        eos_id=eos_id,
    )
