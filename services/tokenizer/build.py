"""Builds a planned corpus in a workspace: vocabulary -> duplicates -> encode -> overlap -> pack."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.common.artifacts.corpus import SPLITS, CorpusPayload, SourceCounts, SourceSplitCounts, Vocabulary
from services.common.artifacts.manifest import require_listable, write_durably
from services.common.artifacts.phase_timer import PhaseTimer
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import ArtifactError
from services.common.input.files import read_file
from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress
from services.common.recipe.schema import Recipe
from services.tokenizer.corpus_plan import CorpusPlan
from services.tokenizer.duplicates import DuplicateLists, find_duplicates
from services.tokenizer.encode_task import EncodedPart, EncodedPartition, EncodeTask, encode_partition
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.encoding.encoder_choice import explain_choice, reference_name
from services.tokenizer.ngram_overlap import NgramOverlap, count_overlap
from services.tokenizer.pack import ShardLayout, pack_split
from services.tokenizer.scratch import open_partition_folder
from services.tokenizer.vocabulary.provision import provide_vocabulary

logger = logging.getLogger(__name__)


def build_corpus(
    workspace: Workspace, recipe: Recipe, plan: CorpusPlan, launcher: Launcher, phase_timer: PhaseTimer
) -> Draft:
    """Build the corpus in the workspace, from the vocabulary and the encoded partitions that scratch has already."""
    with phase_timer.phase("vocabulary"):
        vocabulary_path, vocabulary = provide_vocabulary(recipe, plan, workspace.scratch)
    logger.info("%s", explain_choice(read_file(vocabulary_path), vocabulary, recipe.tokenizer.encoder))
    folder = open_partition_folder(workspace, plan, vocabulary, recipe.tokenizer.encoder)
    duplicates = None
    if recipe.corpus.duplicates == "drop":
        with phase_timer.phase("duplicates"):
            duplicates = find_duplicates(
                folder / "duplicates", plan.partitions, recipe.corpus, launcher, recipe.tokenizer.num_workers
            )
    tasks = make_tasks(recipe, plan, vocabulary_path, vocabulary, folder, duplicates)
    with phase_timer.phase("encode"):
        encoded = _encode(tasks, launcher, recipe.tokenizer.num_workers)
    _require_a_sample(encoded, recipe.corpus.sequence_length)
    _require_listable(encoded, recipe)
    with phase_timer.phase("overlap"):
        overlap = count_overlap(tasks, encoded, launcher, recipe.tokenizer.num_workers)
    with phase_timer.phase("pack"):
        _copy_vocabulary(vocabulary_path, workspace.files / vocabulary.path)
        layout = ShardLayout(
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
        encoder=", ".join(sorted({partition.encoder for partition in encoded})),
        reference=reference_name(vocabulary),
        control_text=recipe.corpus.control_text,
        **{count: sum(getattr(partition, count) for partition in encoded) for count in _SUMMED},
        sources=_count_sources(recipe, plan, encoded, overlap),
        splits=counts,
        phases=tuple(phase_timer.phases),
    )
    return Draft(payload, plan.links)


def make_tasks(
    recipe: Recipe,
    plan: CorpusPlan,
    vocabulary_path: Path,
    vocabulary: Vocabulary,
    scratch: Path,
    duplicates: DuplicateLists | None = None,
) -> list[EncodeTask]:
    return [
        EncodeTask(
            partition=partition,
            scratch=scratch,
            vocabulary_path=vocabulary_path,
            vocabulary=vocabulary,
            encoder=recipe.tokenizer.encoder,
            weight=recipe.corpus.sources[partition.source].weight,
            validation_fraction=recipe.corpus.validation_fraction,
            min_document_bytes=recipe.corpus.min_document_bytes,
            max_document_bytes=recipe.corpus.max_document_bytes,
            invalid_utf8=recipe.corpus.invalid_utf8,
            duplicates=duplicates.of_partition(partition) if duplicates else None,
        )
        for partition in plan.partitions
    ]


# Counts of a corpus that are sums of its partitions' counts.
_SUMMED = (
    "documents_checked",
    "documents_read",
    "documents_empty",
    "documents_too_short",
    "documents_duplicate",
    "documents_not_sampled",
    "documents_with_invalid_utf8",
)


def _encode(tasks: Sequence[EncodeTask], launcher: Launcher, num_workers: int) -> list[EncodedPartition]:
    """Run the tasks, and return their results in the order of the tasks."""
    encoded: dict[int, EncodedPartition] = {}
    done_bytes = tokens = 0
    begin = time.perf_counter()
    with show_progress("encode", sum(task.partition.bytes for task in tasks), "bytes") as progress:
        for index, result in launcher.map_tasks(encode_partition, tasks, num_workers):
            encoded[index] = result
            done_bytes += tasks[index].partition.bytes
            tokens += result.tokens
            seconds = time.perf_counter() - begin
            progress.advance_to(
                done_bytes, f"{done_bytes / seconds / 1e6:,.1f} MB/s, {tokens / seconds / 1e6:,.2f} M tokens/s"
            )
    return [encoded[index] for index in range(len(tasks))]


def _count_sources(
    recipe: Recipe, plan: CorpusPlan, encoded: Sequence[EncodedPartition], overlap: Sequence[NgramOverlap]
) -> tuple[SourceCounts, ...]:
    train_tokens = sum(partition.parts["train"].tokens for partition in encoded)
    counts = []
    for number, source in enumerate(recipe.corpus.sources):
        own = [index for index, partition in enumerate(plan.partitions) if partition.source == number]
        splits = {split: _sum_up(encoded[index].parts[split] for index in own) for split in SPLITS}
        counts.append(
            SourceCounts(
                uri=source.uri,
                weight=source.weight,
                share=splits["train"].tokens / train_tokens,
                splits=splits,
                validation_ngrams=sum(overlap[index].ngrams for index in own),
                validation_ngrams_in_train=sum(overlap[index].ngrams_in_train for index in own),
                documents_duplicate=sum(encoded[index].documents_duplicate for index in own),
            )
        )
    return tuple(counts)


def _sum_up(parts: Iterable[EncodedPart]) -> SourceSplitCounts:
    documents = tokens = text_bytes = 0
    for part in parts:
        documents += part.documents
        tokens += part.tokens
        text_bytes += part.text_bytes
    return SourceSplitCounts(documents=documents, tokens=tokens, text_bytes=text_bytes)


def _require_a_sample(encoded: Sequence[EncodedPartition], sequence_length: int) -> None:
    """Raise `ArtifactError` when the training split is too small for one sample."""
    tokens = sum(partition.parts["train"].tokens for partition in encoded)
    documents = sum(partition.parts["train"].documents for partition in encoded)
    if tokens <= sequence_length:
        raise ArtifactError(
            f"The corpus is {'too small' if tokens else 'empty'}: its training split has {tokens:,} tokens in "
            f"{documents:,} documents, and one sample needs {sequence_length + 1:,} (corpus.sequence_length + 1). "
            f"Add text to corpus.sources, or lower corpus.sequence_length."
        )


def _require_listable(encoded: Sequence[EncodedPartition], recipe: Recipe) -> None:
    """Raise `RecipeError` when the corpus has more files than a manifest lists, before a shard is written."""
    corpus = recipe.corpus
    rows = [sum(partition.parts[split].tokens for partition in encoded) // corpus.sequence_length for split in SPLITS]
    num_files = sum(-(-num_rows // corpus.rows_per_shard) + 1 for num_rows in rows)
    require_listable(num_files + 1)


def _copy_vocabulary(path: Path, target: Path) -> None:
    target.parent.mkdir()
    write_durably(target, read_file(path))
