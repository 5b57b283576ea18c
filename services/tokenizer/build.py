"""Builds a corpus in a workspace: plan -> vocabulary -> duplicates -> encode -> overlap -> pack."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts.corpus import MAX_BAD_FILES, SPLITS, CorpusPayload, SourceCounts, Vocabulary
from services.common.artifacts.manifest import FileEntry, PhaseTimer, sync_folder
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import ArtifactError
from services.common.launch.launcher import Launcher
from services.common.problem_list import list_names
from services.common.process.progress import show_progress
from services.common.recipe.schema import Corpus, Recipe
from services.tokenizer.corpus_inputs import CorpusInputs, digest_code
from services.tokenizer.duplicates import Duplicates, find_duplicates
from services.tokenizer.encode_task import EncodedPartitions, EncodeTask, encode_partition
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.encoding.encoder_choice import describe_choice, reference_name
from services.tokenizer.ngram_overlap import NgramOverlap, count_overlap
from services.tokenizer.pack import pack_splits, write_hashed_file
from services.tokenizer.partition_plan import PlanFolder, plan_partitions
from services.tokenizer.scratch import find_partition_folders, open_partition_folder, plan_folder_of, record_owner
from services.tokenizer.sources.bad_rows import count_by_reason, require_few_bad_rows
from services.tokenizer.tasks import TaskSequence, map_largest_first
from services.tokenizer.vocabulary.provision import provide_vocabulary

logger = logging.getLogger(__name__)


def build_corpus(
    workspace: Workspace, recipe: Recipe, inputs: CorpusInputs, launcher: Launcher, phase_timer: PhaseTimer
) -> Draft:
    """Build the corpus in the workspace, from the plan, the vocabulary and the partitions that scratch has already."""
    num_workers = recipe.tokenizer.num_workers
    record_owner(workspace, recipe)
    with phase_timer.phase("plan"):
        plan = plan_partitions(plan_folder_of(workspace, recipe, inputs), recipe, inputs.listings, launcher)
    with phase_timer.phase("vocabulary"):
        vocabulary_path, vocabulary = provide_vocabulary(recipe, inputs, workspace.scratch)
        logger.info("%s", describe_choice(vocabulary_path, vocabulary, recipe.tokenizer.encoder))
    folder = open_partition_folder(workspace, plan.path, vocabulary, recipe.tokenizer.encoder)
    duplicates = None
    if recipe.corpus.duplicates == "drop":
        with phase_timer.phase("duplicates"):
            duplicates = find_duplicates(folder, plan, recipe.corpus, launcher, num_workers)
    with phase_timer.phase("encode"):
        others = find_partition_folders(workspace)
        tasks = make_tasks(recipe, plan, vocabulary_path, vocabulary, folder, duplicates, others)
        encoded = _encode(tasks, plan, launcher, num_workers)
    _check_text(encoded, recipe.corpus)
    with phase_timer.phase("overlap"):
        overlap = count_overlap(folder, vocabulary, encoded, launcher, num_workers)
    with phase_timer.phase("pack"):
        vocabulary_entries = _copy_vocabulary(vocabulary_path.parent, workspace.files, vocabulary)
        splits, entries = pack_splits(
            workspace.files, folder, encoded, recipe.corpus, vocabulary, launcher, num_workers
        )
        sync_folder(workspace.files)
    payload = CorpusPayload(
        vocabulary=vocabulary,
        encoder=", ".join(sorted(encoded.encoders)),
        reference=reference_name(vocabulary),
        control_text=recipe.corpus.control_text,
        token_dtype=token_dtype(vocabulary.vocab_size),
        sequence_length=recipe.corpus.sequence_length,
        rows_per_shard=recipe.corpus.rows_per_shard,
        **encoded.counts,
        bad_rows=count_by_reason(encoded.bad_files),
        bad_files=tuple(encoded.bad_files[:MAX_BAD_FILES]),
        sources=_count_sources(recipe, encoded, overlap),
        splits=splits,
        source_code=digest_code(),
        phases=tuple(phase_timer.phases),
    )
    links = inputs.link(recipe, [encoded.text_digest(source) for source in range(len(recipe.corpus.sources))])
    files = sorted([*vocabulary_entries, *entries], key=lambda entry: entry.path)
    return Draft(payload, links, tuple(files), keeps_scratch=recipe.tokenizer.keep_encoded)


def make_tasks(
    recipe: Recipe,
    plan: PlanFolder,
    vocabulary_path: Path,
    vocabulary: Vocabulary,
    folder: Path,
    duplicates: Duplicates | None = None,
    others: tuple[Path, ...] = (),
) -> Sequence[EncodeTask]:
    """Return the encode tasks of the partitions in the plan's order. `folder` is that of their results."""
    return TaskSequence(
        len(plan.read_partitions()),
        lambda index: EncodeTask(index, plan.path, folder, recipe, vocabulary_path, vocabulary, duplicates, others),
    )


def _encode(tasks: Sequence[EncodeTask], plan: PlanFolder, launcher: Launcher, num_workers: int) -> EncodedPartitions:
    partitions = plan.read_partitions()
    encoded, sizes = EncodedPartitions(partitions), partitions["bytes"]
    done_bytes = tokens = num_encoded = 0
    start = time.perf_counter()
    with show_progress("encode", int(sizes.sum()), "bytes") as progress:
        for index, (result, is_new) in map_largest_first(launcher, encode_partition, tasks, sizes, num_workers):
            num_encoded += is_new
            encoded.add(index, result)
            done_bytes += int(sizes[index])
            tokens += result.tokens
            seconds = time.perf_counter() - start
            progress.advance_to(
                done_bytes, f"{done_bytes / seconds / 1e6:,.1f} MB/s, {tokens / seconds / 1e6:,.2f} M tokens/s"
            )
    if num_encoded < len(tasks):
        logger.info("encoded %s of %s partitions; the others were there", f"{num_encoded:,}", f"{len(tasks):,}")
    return encoded


def _check_text(encoded: EncodedPartitions, corpus: Corpus) -> None:
    """Warn of files and splits without text. Raises `ArtifactError` for too many bad rows, or too few tokens."""
    bad_files = encoded.bad_files
    require_few_bad_rows(bad_files, sum(file.num_rows for file in bad_files), corpus.max_bad_rows)
    if files := encoded.files_without_text:
        logger.warning("all rows are empty documents in %s: is `column` the right one?", list_names(sorted(files)))
    train = encoded.totals("train")
    if train.tokens <= corpus.sequence_length:
        raise ArtifactError(
            f"The training split has {train.tokens:,} tokens in {train.documents:,} documents, and one sample needs "
            f"{corpus.sequence_length + 1:,} (corpus.sequence_length + 1). Add text to corpus.sources, or lower "
            f"corpus.sequence_length."
        )
    if corpus.validation_fraction and not encoded.totals("validation").documents:
        logger.warning("no validation documents, so no validation loss: raise corpus.validation_fraction or split text")


def _count_sources(
    recipe: Recipe, encoded: EncodedPartitions, overlap: Sequence[NgramOverlap]
) -> tuple[SourceCounts, ...]:
    train_tokens = encoded.totals("train").tokens
    counts = []
    for number, source in enumerate(recipe.corpus.sources):
        splits = {split: encoded.totals(split, number) for split in SPLITS}
        counts.append(
            SourceCounts(
                uri=source.uri,
                weight=source.weight,
                share=splits["train"].tokens / train_tokens,
                splits=splits,
                validation_ngrams=overlap[number].ngrams,
                validation_ngrams_in_train=overlap[number].ngrams_in_train,
                documents_duplicate=int(encoded.duplicates[encoded.sources == number].sum()),
            )
        )
    return tuple(counts)


def _copy_vocabulary(source: Path, folder: Path, vocabulary: Vocabulary) -> list[FileEntry]:
    """Write the vocabulary's files to their place below `folder`, and return the manifest's entries of the files."""
    target, entries = (folder / vocabulary.path).parent, []
    target.mkdir()
    for path in source.iterdir():
        with write_hashed_file(target / path.name) as file:
            file.write(path.read_bytes())
        entries.append(file.entry(f"{target.name}/{path.name}"))
    sync_folder(target)
    return entries
