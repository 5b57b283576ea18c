"""What happens between plan and publish: vocabulary -> encode -> pack."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts.corpus import SPLITS, CorpusPayload
from services.common.artifacts.manifest import write_durably
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import ArtifactError
from services.common.launch.launcher import Launcher
from services.common.recipe import Recipe
from services.common.telemetry import Stopwatch, show_progress
from services.tokenizer.encode_task import EncodedSplit, EncodeTask, encode_split
from services.tokenizer.encoder import token_dtype
from services.tokenizer.pack import Layout, pack_split
from services.tokenizer.plan import Plan, begin_scratch
from services.tokenizer.vocabulary import MODEL_IN_CORPUS, provide_vocabulary


def build_corpus(workspace: Workspace, recipe: Recipe, plan: Plan, launcher: Launcher, stopwatch: Stopwatch) -> Draft:
    """Fill the workspace. What an interrupted attempt finished in `scratch` is kept: vocabulary, encoded splits."""
    begin_scratch(workspace.scratch, plan)
    with stopwatch.phase("vocabulary"):
        vocabulary_path, vocabulary = provide_vocabulary(recipe, plan, workspace.scratch)
    tasks = [
        EncodeTask(
            split=split,
            scratch=workspace.scratch,
            vocabulary_path=vocabulary_path,
            vocabulary=vocabulary,
            validation_fraction=recipe.corpus.validation_fraction,
            invalid_utf8=recipe.corpus.invalid_utf8,
        )
        for split in plan.splits
    ]
    with stopwatch.phase("encode"):
        encoded = _encode(tasks, launcher, recipe.tokenizer.num_workers)
    _require_a_sample(encoded, recipe.corpus.sequence_length)
    with stopwatch.phase("pack"):
        _empty(workspace.files)
        _copy_vocabulary(vocabulary_path, workspace.files)
        layout = Layout(
            token_dtype=token_dtype(vocabulary.vocab_size),
            sequence_length=recipe.corpus.sequence_length,
            rows_per_shard=recipe.corpus.rows_per_shard,
        )
        counts = {split: pack_split(workspace.files, split, tasks, encoded, layout) for split in SPLITS}
    payload = CorpusPayload(
        vocabulary=vocabulary,
        token_dtype=layout.token_dtype,
        sequence_length=layout.sequence_length,
        rows_per_shard=layout.rows_per_shard,
        documents_read=sum(each.documents_read for each in encoded),
        documents_empty=sum(each.documents_empty for each in encoded),
        documents_with_invalid_utf8=sum(each.documents_with_invalid_utf8 for each in encoded),
        text_bytes=sum(each.text_bytes for each in encoded),
        splits=counts,
        phases=tuple(stopwatch.phases),
    )
    return Draft(payload, plan.links)


def _encode(tasks: Sequence[EncodeTask], launcher: Launcher, num_workers: int) -> list[EncodedSplit]:
    """Results in the order of the tasks, whichever finishes first."""
    encoded: dict[int, EncodedSplit] = {}
    done_bytes = 0
    with show_progress("encode", sum(task.split.bytes for task in tasks), "bytes") as progress:
        for index, result in launcher.map_tasks(encode_split, tasks, num_workers):
            encoded[index] = result
            done_bytes += tasks[index].split.bytes
            progress.advance_to(done_bytes)
    return [encoded[index] for index in range(len(tasks))]


def _require_a_sample(encoded: Sequence[EncodedSplit], sequence_length: int) -> None:
    tokens = sum(each.parts["train"].tokens for each in encoded)
    documents = sum(each.parts["train"].documents for each in encoded)
    if tokens <= sequence_length:
        raise ArtifactError(
            f"The corpus is {'too small' if tokens else 'empty'}: its training split has {tokens:,} tokens in "
            f"{documents:,} documents, and one sample needs {sequence_length + 1:,} (corpus.sequence_length + 1). "
            f"Add text to corpus.sources, or lower corpus.sequence_length."
        )


def _empty(folder: Path) -> None:
    """Packing is copying, so it starts anew; what a killed attempt left would be published with the rest."""
    shutil.rmtree(folder)
    folder.mkdir()


def _copy_vocabulary(path: Path, folder: Path) -> None:
    target = folder / MODEL_IN_CORPUS
    target.parent.mkdir()
    write_durably(target, path.read_bytes())
