"""The tokenizer's commands. `python -m services.tokenizer --recipe FILE` turns text into a corpus:

list -> plan -> vocabulary -> duplicates, if asked for -> encode -> overlap -> pack -> publish
"""

from __future__ import annotations

import time

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import total_bytes
from services.common.artifacts.manifest import PhaseTimer
from services.common.artifacts.store import Address, Artifact
from services.common.launch.launcher import Launcher, choose_launcher
from services.common.launch.metrics_export import export_metrics
from services.common.notices import publish_with_notices
from services.common.process.command_line import (
    ROOT,
    Context,
    DryRun,
    Given,
    Launch,
    MetricsHost,
    MetricsPort,
    RecipeCommand,
    RecipePath,
    Root,
    StageGroup,
    make_app,
    read_given,
    run_app,
)
from services.common.process.progress import reporting_progress
from services.common.process.telemetry import configure_logging
from services.common.recipe.derived import describe
from services.tokenizer.build import build_corpus
from services.tokenizer.corpus_inputs import CONTENT_VERSION, digest_code, list_corpus_inputs
from services.tokenizer.scratch import discard_outdated
from services.tokenizer.sources.bad_rows import require_few_bad_rows, show_first
from services.tokenizer.tools.pinning import pin
from services.tokenizer.tools.vocabulary_tool import train_vocab

app = make_app(StageGroup)


@app.callback()
def prepare() -> None:
    configure_logging("tokenizer")


def main(argv: list[str]) -> int:
    return run_app(app, argv, "services.tokenizer")


@app.command(cls=RecipeCommand)
@reporting_progress("tokenizer")
def tokenize(
    context: Context,
    recipe_path: RecipePath,
    root: Root = ROOT,
    launch: Launch = "",
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    dry_run: DryRun = False,
) -> int:
    """Turn text into a corpus of packed token rows."""
    start = time.perf_counter()
    given = read_given(context, recipe_path, root)
    if dry_run:
        print(describe(given.recipe, None))
        return 0
    launcher = choose_launcher(launch)
    with (
        launcher.keep_processes(given.recipe.tokenizer.num_workers),
        export_metrics((), root, launch, metrics_port, metrics_host),
    ):
        corpus, is_new = _publish(given, launcher)
    print(summarize(corpus, is_new, time.perf_counter() - start))
    return 0


app.command("train-vocab")(train_vocab)
app.command()(pin)


def _publish(given: Given, launcher: Launcher) -> tuple[Artifact[CorpusManifest], bool]:
    """Return the recipe's corpus, and whether this call made it."""
    recipe, phase_timer = given.recipe, PhaseTimer()
    with phase_timer.phase("list"):
        inputs = list_corpus_inputs(recipe)
    address = Address(given.root, "corpus", recipe.corpus.name, inputs.artifact_id)
    corpus, is_new = publish_with_notices(
        address,
        CorpusManifest,
        "tokenizer",
        recipe,
        given.recipe_path,
        lambda workspace: build_corpus(workspace, recipe, inputs, launcher, phase_timer),
    )
    discard_outdated(address, recipe)
    payload = corpus.manifest.corpus
    require_few_bad_rows(payload.bad_files, payload.num_bad_rows, recipe.corpus.max_bad_rows)
    return corpus, is_new


def summarize(corpus: Artifact[CorpusManifest], is_new: bool, seconds: float) -> str:
    """Return what the stage prints at its end: folder, sizes, counts, encoder and seconds of each phase."""
    payload, files = corpus.manifest.corpus, corpus.manifest.files
    lines = [
        f"{'published' if is_new else 'already published'}  {corpus.path}",
        f"  size        {total_bytes(files):,} bytes in {len(files)} files, from {payload.text_bytes:,} bytes of text",
    ]
    for split, counts in payload.splits.items():
        samples = max(0, (counts.tokens - 1) // payload.sequence_length)
        lines.append(
            f"  {split:<10}  {counts.tokens:,} tokens in {counts.documents:,} documents, "
            f"{samples:,} samples of {payload.sequence_length:,}"
        )
    noted = {
        "empty documents dropped": payload.documents_empty,
        "shorter than corpus.min_document_bytes dropped": payload.documents_too_short,
        "exact duplicates dropped": payload.documents_duplicate,
        "left out by their source's weight": payload.documents_not_sampled,
        "further copies by their source's weight": payload.documents_repeated,
        "documents with invalid UTF-8 repaired": payload.documents_with_invalid_utf8,
    }
    if any(noted.values()):
        lines.append("  noted       " + ", ".join(f"{count:,} {what}" for what, count in noted.items() if count))
    if payload.bad_rows:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in payload.bad_rows.items())
        lines.append(f"  bad rows    {payload.num_bad_rows:,} skipped: {reasons}")
        lines += [f"              {line}" for line in show_first(payload.bad_files)]
    if payload.validation_ngrams:
        share = payload.validation_ngrams_in_train / payload.validation_ngrams
        lines.append(
            f"  overlap     {share:.1%} of validation: {payload.validation_ngrams_in_train:,} of "
            f"{payload.validation_ngrams:,} 13-grams of tokens are in train, too"
        )
    if len(payload.sources) > 1:
        lines += [
            f"  {source.share:>10.1%}  of the training tokens, and {source.splits['validation'].tokens:,} validation "
            f"tokens: {source.uri}, weight {source.weight:g}"
            for source in payload.sources
        ]
    checked = f", the same as {payload.reference}'s for {payload.documents_checked:,} documents that both encoded"
    lines.append(f"  ids         by {payload.encoder}{checked if payload.documents_checked else ''}")
    if payload.source_code != digest_code():
        by = corpus.manifest.producer
        lines.append(
            f"  made by     tokenizer {by.version}, commit {by.git_sha[:12]}; the code has changed since. If it gives "
            f"other bytes, raise CONTENT_VERSION (now {CONTENT_VERSION}) in services/tokenizer/corpus_inputs.py"
        )
    spent = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in payload.phases)
    spent = spent if is_new else "only the manifest was read"
    return "\n".join([*lines, f"  seconds     {seconds:.1f} ({spent})"])
