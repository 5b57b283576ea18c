"""Builds a corpus in a workspace: plan -> vocabulary -> duplicates -> encode -> overlap -> pack."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.artifacts.corpus import MAX_BAD_FILES, SPLITS, CorpusPayload, SourceCounts, Vocabulary
from services.common.artifacts.manifest import FileEntry, PhaseTimer, sync_folder
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import ArtifactError
from services.common.launch.launcher import Launcher
from services.common.problem_list import list_names
from services.common.process.progress import show_progress
from services.common.recipe.schema import Recipe
from services.tokenizer.corpus_inputs import CorpusInputs
from services.tokenizer.duplicates import DuplicateLists, find_duplicates
from services.tokenizer.encode_task import EncodeTask, encode_partition
from services.tokenizer.encoded_partitions import EncodedPartitions
from services.tokenizer.encoding.encoder import sampled_bytes_of_worker, token_dtype
from services.tokenizer.encoding.encoder_choice import explain_choice, reference_name
from services.tokenizer.ngram_overlap import NgramOverlap, count_overlap
from services.tokenizer.pack import ShardLayout, pack_splits, write_hashed_file
from services.tokenizer.partition_plan import Partitions, plan_partitions
from services.tokenizer.scratch import find_partition_folders, open_partition_folder, plan_folder_of, record_owner
from services.tokenizer.sources.bad_rows import count_by_reason, require_few_bad_rows
from services.tokenizer.tasks import TaskSequence, map_largest_first
from services.tokenizer.vocabulary.provision import provide_vocabulary

logger = logging.getLogger(__name__)


def build_corpus(
    workspace: Workspace, recipe: Recipe, inputs: CorpusInputs, launcher: Launcher, phase_timer: PhaseTimer
) -> Draft:
    """Build the corpus in the workspace, from the plan, the vocabulary and the partitions that scratch has already."""
    record_owner(workspace, recipe)
    with phase_timer.phase("plan"):
        plan = plan_partitions(plan_folder_of(workspace, recipe, inputs), recipe, inputs.listings, launcher)
    with phase_timer.phase("vocabulary"):
        vocabulary_path, vocabulary = provide_vocabulary(recipe, inputs, workspace.scratch)
    folder = open_partition_folder(workspace, plan.path, vocabulary, recipe.tokenizer.encoder)
    others = find_partition_folders(workspace)
    partitions = plan.read_partitions()
    duplicates = None
    if recipe.corpus.duplicates == "drop":
        with phase_timer.phase("duplicates"):
            duplicates = find_duplicates(folder, plan, recipe.corpus, launcher, recipe.tokenizer.num_workers)
    tasks = make_tasks(recipe, plan.path, partitions, vocabulary_path, vocabulary, folder, duplicates, others)
    with phase_timer.phase("encode"):
        encoded = _encode(
            tasks,
            partitions,
            launcher,
            recipe.tokenizer.num_workers,
            lambda: explain_choice(vocabulary_path.read_bytes(), vocabulary, recipe.tokenizer.encoder),
        )
    bad_files = encoded.bad_files
    bad_rows = count_by_reason(bad_files)
    require_few_bad_rows(bad_files, sum(bad_rows.values()), recipe.corpus.max_bad_rows)
    doubts = {
        "all rows are empty documents in %s: is `column` the right one?": encoded.files_without_text,
        "more than 1 %% of the characters were repaired in %s: are they UTF-8?": encoded.files_repaired,
    }
    for doubt, uris in doubts.items():
        if uris:
            logger.warning(doubt, list_names(sorted(uris)))
    _require_a_sample(encoded, recipe.corpus.sequence_length)
    with phase_timer.phase("overlap"):
        overlap = count_overlap(tasks, encoded, launcher, recipe.tokenizer.num_workers)
    with phase_timer.phase("pack"):
        vocabulary_entry = _copy_vocabulary(vocabulary_path, workspace.files, vocabulary)
        layout = ShardLayout(
            token_dtype=token_dtype(vocabulary.vocab_size),
            sequence_length=recipe.corpus.sequence_length,
            rows_per_shard=recipe.corpus.rows_per_shard,
        )
        counts, entries = pack_splits(workspace.files, folder, encoded, layout, launcher, recipe.tokenizer.num_workers)
        sync_folder(workspace.files)
    payload = CorpusPayload(
        vocabulary=vocabulary,
        token_dtype=layout.token_dtype,
        sequence_length=layout.sequence_length,
        rows_per_shard=layout.rows_per_shard,
        encoder=", ".join(sorted(encoded.encoders)),
        reference=reference_name(vocabulary),
        control_text=recipe.corpus.control_text,
        **encoded.counts,
        bad_rows=bad_rows,
        bad_files=tuple(bad_files[:MAX_BAD_FILES]),
        sources=_count_sources(recipe, encoded, overlap),
        splits=counts,
        phases=tuple(phase_timer.phases),
    )
    text_digests = [encoded.text_digest(source) for source in range(len(recipe.corpus.sources))]
    files = sorted([vocabulary_entry, *entries], key=lambda entry: entry.path)
    return Draft(payload, inputs.link(recipe, text_digests), tuple(files), keeps_scratch=recipe.tokenizer.keep_encoded)


def make_tasks(
    recipe: Recipe,
    plan: Path,
    partitions: Partitions,
    vocabulary_path: Path,
    vocabulary: Vocabulary,
    scratch: Path,
    duplicates: DuplicateLists | None = None,
    others: tuple[Path, ...] = (),
) -> TaskSequence[EncodeTask]:
    """Return the encode tasks of the partitions in the plan's order.

    `scratch` is the folder of their results, and `others` are folders with results for other inputs.
    """

    def make_task(index: int) -> EncodeTask:
        return EncodeTask(
            index=index,
            plan=plan,
            scratch=scratch,
            vocabulary_path=vocabulary_path,
            vocabulary=vocabulary,
            encoder=recipe.tokenizer.encoder,
            sampled_bytes=sampled_bytes_of_worker(recipe.tokenizer.num_workers),
            corpus=recipe.corpus,
            duplicates=duplicates.of_partition(int(partitions["first_pass_index"][index])) if duplicates else None,
            others=others,
        )

    return TaskSequence(len(partitions), make_task)


def _encode(
    tasks: Sequence[EncodeTask],
    partitions: Partitions,
    launcher: Launcher,
    num_workers: int,
    explain_encoder: Callable[[], str],
) -> EncodedPartitions:
    """Run the tasks. The log gets `explain_encoder()` with the first result: it takes 0.1 s, while the workers work."""
    encoded, sizes = EncodedPartitions(partitions), partitions["bytes"]
    done_bytes = tokens = num_encoded = 0
    begin = time.perf_counter()
    with show_progress("encode", int(sizes.sum()), "bytes") as progress:
        for index, (result, is_new) in map_largest_first(launcher, encode_partition, tasks, sizes, num_workers):
            if is_new and not num_encoded:
                logger.info("%s", explain_encoder())
            num_encoded += is_new
            encoded.add(index, result)
            done_bytes += int(sizes[index])
            tokens += result.tokens
            seconds = time.perf_counter() - begin
            progress.advance_to(
                done_bytes, f"{done_bytes / seconds / 1e6:,.1f} MB/s, {tokens / seconds / 1e6:,.2f} M tokens/s"
            )
    if num_encoded < len(tasks):
        logger.info("encoded %s of %s partitions; the others were there", f"{num_encoded:,}", f"{len(tasks):,}")
    return encoded


def _count_sources(
    recipe: Recipe, encoded: EncodedPartitions, overlap: Sequence[NgramOverlap]
) -> tuple[SourceCounts, ...]:
    train_tokens = encoded.totals("train").tokens
    counts = []
    for number, source in enumerate(recipe.corpus.sources):
        splits = {split: encoded.totals_of_source(number, split) for split in SPLITS}
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


def _require_a_sample(encoded: EncodedPartitions, sequence_length: int) -> None:
    """Raise `ArtifactError` when the training split is too small for one sample."""
    totals = encoded.totals("train")
    tokens, documents = totals.tokens, totals.documents
    if tokens <= sequence_length:
        raise ArtifactError(
            f"The corpus is {'too small' if tokens else 'empty'}: its training split has {tokens:,} tokens in "
            f"{documents:,} documents, and one sample needs {sequence_length + 1:,} (corpus.sequence_length + 1). "
            f"Add text to corpus.sources, or lower corpus.sequence_length."
        )


def _copy_vocabulary(path: Path, folder: Path, vocabulary: Vocabulary) -> FileEntry:
    """Write the vocabulary to its place below `folder`, and return the manifest's entry of the file."""
    target = folder / vocabulary.path
    target.parent.mkdir()
    with write_hashed_file(target) as file:
        file.write(path.read_bytes())
    sync_folder(target.parent)
    return file.entry(vocabulary.path)
