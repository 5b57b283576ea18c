"""The trainer stage: corpus/4 + compile_cache/1 -> checkpoint/4 and run/1.

`python -m services.trainer [COMMAND] --recipe FILE`; COMMANDS lists the commands, and `train` is the default.
"""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.store import Address, Artifact, open_artifact
from services.common.artifacts.upstream import open_corpus, stage_command
from services.common.errors import ArtifactError, MillraceError, RecipeError, naming_the_place
from services.common.hardware.image_platform import require_backend
from services.common.launch.metrics_export import export_metrics
from services.common.process.brought_files import offer_file
from services.common.process.command_line import RecipeParser, require_text
from services.common.process.progress_record import report_published, reporting_progress
from services.common.process.telemetry import configure_logging
from services.common.program.backends.slow_paths import slow_paths
from services.common.program.fingerprint import program_facts
from services.common.recipe.derived import describe, explain_repetition, explain_schedule_end
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.branch import describe_parent, name_run, open_parent, require_same_vocabulary
from services.trainer.checkpoints.lookup import (
    choose_checkpoint,
    newest_checkpoint,
    require_of_run,
    verify_sizes,
    verify_state,
)
from services.trainer.checkpoints.retention import discard_left_over
from services.trainer.command_inputs import (
    find_published_corpus,
    name_own_run,
    new_job,
    open_job,
    open_own_corpus,
    open_own_run,
    read_nxd_layout,
)
from services.trainer.command_options import (
    compare_parser,
    evaluate_parser,
    export_parser,
    import_parser,
    inspect_parser,
    named_report_parser,
    plan_parser,
    report_parser,
    runs_parser,
    sample_parser,
    summary_parser,
    train_parser,
)
from services.trainer.conversion.export import export
from services.trainer.conversion.weight_import import import_weights
from services.trainer.corpus import describe_corpus
from services.trainer.evaluation.checkpoint import describe_table, evaluate_checkpoint
from services.trainer.evaluation.records import lacks_last_evaluation
from services.trainer.inspection.checkpoint_content import inspect
from services.trainer.inspection.doctor import doctor, doctor_parser
from services.trainer.inspection.fit import require_fit
from services.trainer.inspection.run_plan import describe_plan, read_assumptions
from services.trainer.inspection.sample import TextGenerator, require_drawable
from services.trainer.job import (
    Job,
    completed_step,
    continue_run,
)
from services.trainer.metrics.commands import recording_command
from services.trainer.metrics.prometheus import RunCollector
from services.trainer.metrics.trackers import require_trackers, tracking
from services.trainer.node_staging import prepare_node, using_node
from services.trainer.notices import notifying_run
from services.trainer.report.run_report import read_state, write_report
from services.trainer.run import (
    Run,
    describe_skips,
    describe_state,
    open_run,
    open_started_run,
    summarize,
    write_run,
    writing_costs,
)
from services.trainer.run_start import describe_start, explain_new_run
from services.trainer.runs.comparison import COMPARE, compare_runs
from services.trainer.runs.listing import RUNS, find_run, list_runs
from services.trainer.supervise import supervise

logger = logging.getLogger(__name__)

CLOSING_PROMPTS = ("If the", "Return a", "The method")


def main(argv: list[str], recipe: Recipe | None = None) -> int:
    """Run the command in `argv`, whose recipe may have been loaded before."""
    configure_logging("trainer")
    if argv and argv[0] in WITHOUT_RECIPE:
        return WITHOUT_RECIPE[argv[0]](argv[1:])
    if argv[:1] == ["report"] and any(word.split("=")[0] == "--run" for word in argv):
        return report_named_run(argv[1:])
    name, options = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    command = COMMANDS[name]
    arguments, recipe = command.make_parser().parse(options, recipe)
    return command.run(arguments, recipe)


@reporting_progress("trainer")
def train(arguments: Namespace, recipe: Recipe) -> int:
    """Train to the recipe's max_steps, continuing from the newest checkpoint."""
    if arguments.dry_run:
        corpus = find_published_corpus(arguments, recipe)
        known = describe_start(arguments.root, recipe, corpus)
        print(describe(recipe, corpus.payload if corpus else None, known))
        return 0
    require_backend(recipe.parallel.device)
    require_trackers(arguments.tracker)
    job = open_job(arguments, recipe)
    job.run_folder.mkdir(parents=True, exist_ok=True)
    with (
        hold_lock(job.lock),
        writing_costs(job),
        recording_command(job),
        using_node(job),
    ):
        discard_left_over(job.checkpoint_collection)
        checkpoint = newest_checkpoint(job.checkpoint_collection, verify_sizes)  # the workers verify what they load
        if checkpoint and completed_step(checkpoint) >= recipe.train.max_steps and not _is_reported(job, checkpoint):
            # The command that wrote it was killed, so its files are read once. Later commands compare sizes alone.
            checkpoint = newest_checkpoint(job.checkpoint_collection, verify_state(recipe, job.corpus))
        if checkpoint is None:
            job = _begin_run(job, arguments.recipe)
        step = completed_step(checkpoint)
        is_complete = step >= recipe.train.max_steps and not lacks_last_evaluation(job, step)
        if checkpoint and not is_complete:
            job = continue_run(job, checkpoint, arguments.allow_changed_program)
        write_run(job)
        if checkpoint and is_complete:
            if not _is_reported(job, checkpoint):
                report_training(job, arguments.recipe)
            report_published(job.checkpoint_collection, is_new=False)
            print(f"the run is complete: step {step} of {recipe.train.max_steps}, {job.checkpoint_collection}")
            return 0
        warnings = [explain_schedule_end(recipe), explain_repetition(recipe, job.corpus.payload)]
        for problem in filter(None, [*warnings, *slow_paths(recipe).values()]):
            logger.warning("%s", problem)
        prepare_node(job)
        with (
            export_metrics([RunCollector(job)], arguments),
            tracking(job, arguments.tracker),
            naming_the_place(job.root),
            notifying_run(job, arguments.recipe) as observe,
        ):
            supervise(replace(job, workers_started_at=datetime.now(UTC)), observe)
        discard_left_over(job.checkpoint_collection)
    report_training(job, arguments.recipe)
    report_published(job.checkpoint_collection, is_new=True)
    print(f"trained to step {recipe.train.max_steps}: {job.checkpoint_collection}")
    return 0


def _begin_run(job: Job, recipe_path: Path) -> Job:
    """Return the job of a run without a checkpoint, which has the waivers of the run that it branches from.

    Raises `ArtifactError` if the weights or the checkpoint with which it begins are missing.
    """
    recipe = job.recipe
    if recipe.train.initial_weights:
        raise ArtifactError(
            f"{job.run}: begins with imported weights (train.initial_weights), which are not imported yet. Import "
            f"them: `{stage_command('trainer', recipe_path, job.root, 'import', '--from', 'FOLDER')}`"
        )
    if recipe.train.branch:
        parent = open_parent(job.root, recipe.train.branch)
        require_same_vocabulary(job.root, parent, recipe, job.corpus)
        logger.info("%s branches from %s", job.run, describe_parent(job.root, recipe, job.corpus, job.lineage))
        return replace(job, waivers=tuple(sorted({*job.waivers, *parent.manifest.checkpoint.waivers})))
    if before := explain_new_run(job.root, recipe, job.corpus):
        logger.info("%s is a new run and does not continue %s", job.run, before)
    return job


def plan(arguments: Namespace, recipe: Recipe) -> int:
    """Print the run's needs. Raises `RecipeError` if a worker needs more memory than its device has."""
    assumptions = read_assumptions(arguments)
    corpus = find_published_corpus(arguments, recipe)
    print(describe_plan(recipe, corpus.payload if corpus else None, assumptions), flush=True)
    require_fit(recipe)
    return 0


def summary(arguments: Namespace, recipe: Recipe) -> int:
    """Print what the three stages made, and a sample of the model's writing."""
    run = open_own_run(arguments, recipe)
    print(summarize(run))
    print(f"\nThe model writes:\n{closing_sample(run)}")
    return 0


def report(arguments: Namespace, recipe: Recipe) -> int:
    """Write report.html into the run's folder, with a sample of the model's writing for `--sample`.

    The run may be going on. Before its first checkpoint there is no model for a sample: `ArtifactError`.
    """
    return _report(arguments.root, name_own_run(arguments, recipe), with_sample=arguments.sample)


def report_named_run(argv: list[str]) -> int:
    """Do the same as `report` for the run that `--run` names."""
    arguments = named_report_parser().parse_args(argv)
    require_text(arguments)
    root = arguments.root.absolute()
    return _report(root, find_run(root, arguments.run), with_sample=arguments.sample)


def _report(root: Path, name: str, *, with_sample: bool) -> int:
    if with_sample:
        run = open_run(root, name)
        path = write_report(run, closing_sample(run))
    else:
        path = write_report(open_started_run(root, name, verify_sizes))
    print(path)
    offer_file(path)
    return 0


def print_sample(arguments: Namespace, recipe: Recipe) -> int:
    """Let the newest checkpoint continue a prompt."""
    require_drawable(arguments.tokens, arguments.temperature, arguments.seed)
    run = open_own_run(arguments, recipe)
    print(TextGenerator(run).generate(arguments.prompt, arguments.tokens, arguments.temperature, arguments.seed))
    return 0


def evaluate(arguments: Namespace, recipe: Recipe) -> int:
    """Evaluate a checkpoint on the validation split of a corpus."""
    if arguments.tokens is not None and arguments.tokens < 1:
        raise RecipeError(f"--tokens {arguments.tokens:,}: expected 1 or more.")
    require_backend(recipe.parallel.device)
    if arguments.checkpoint:
        checkpoint = open_artifact(arguments.checkpoint.absolute(), CheckpointManifest)
        verify_sizes(checkpoint)
    else:
        own = describe_corpus(open_corpus(recipe, arguments.recipe, arguments.root))
        collection = Address(arguments.root, "checkpoint", name_run(arguments.root, recipe, own), "").collection
        checkpoint = choose_checkpoint(collection, arguments.step, verify_sizes)
        require_of_run(checkpoint, recipe, own)
    record = evaluate_checkpoint(open_job(arguments, recipe), checkpoint, arguments.tokens)
    print(json.dumps(record) if arguments.json else describe_table(record))
    return 0


def export_model(arguments: Namespace, recipe: Recipe) -> int:
    """Write the newest checkpoint as a Hugging Face folder or as an NxD checkpoint."""
    nxd, count = read_nxd_layout(arguments), arguments.average_last
    if count < 1:
        raise RecipeError(f"--average-last {count}: expected the number of checkpoints, at least 1.")
    if nxd and count > 1:
        raise RecipeError(
            f"--average-last {count} applies to --format hugging-face only: an NxD checkpoint is for a run that goes "
            f"on, and no run has had the mean of several states. Leave one of the two options out."
        )
    run = open_own_run(arguments, recipe)
    options = {"allow_non_finite": arguments.allow_non_finite_weights, "average_last": count, "dtype": arguments.dtype}
    print(export(run, arguments.output, nxd, **options))
    return 0


def import_model(arguments: Namespace, recipe: Recipe) -> int:
    """Begin the run with the weights of a Hugging Face folder, or of an NxD or a DCP checkpoint."""
    corpus, program = open_own_corpus(arguments, recipe), fingerprint(program_facts(recipe))
    job = new_job(arguments.root, recipe, corpus, None, program)
    with hold_lock(job.lock), naming_the_place(job.root):
        print(import_weights(job, arguments.source))
        write_run(job)
    return 0


def inspect_checkpoint(arguments: Namespace, recipe: Recipe) -> int:
    """Print the content of a checkpoint: of the given step, or the newest one that verifies."""
    corpus = open_own_corpus(arguments, recipe)
    collection = Address(arguments.root, "checkpoint", name_run(arguments.root, recipe, corpus), "").collection
    checkpoint = choose_checkpoint(collection, arguments.step)
    require_of_run(checkpoint, recipe, corpus)
    for line in inspect(checkpoint, recipe):
        print(line)
    return 0


def _is_reported(job: Job, checkpoint: Artifact[CheckpointManifest]) -> bool:
    """Whether the report is of this state, which it is not where a command was killed before it wrote the report."""
    return read_state(job.run_folder) == describe_state(checkpoint)


def report_training(job: Job, recipe_path: Path) -> None:
    """Write the report of a complete run. The report is a view: if it fails, the training has still succeeded.

    It reads no weights, because the command's node may be too small for them.
    """
    try:
        run = open_run(job.root, job.run, verify_sizes)
        if run.checkpoint.manifest.checkpoint.skipped_steps:
            logger.warning("skipped: %s", describe_skips(run))
        write_report(run)
    except Exception as error:
        expected = isinstance(error, MillraceError | OSError)
        logger.warning(
            "the training is complete, but its report could not be written: %s. Write it with `%s`",
            error,
            stage_command("trainer", recipe_path, job.root, "report"),
            exc_info=not expected,  # a bug gets its traceback, and the training still counts
        )


def closing_sample(run: Run) -> str:
    """Let the model continue CLOSING_PROMPTS. This needs the memory of the model in float32."""
    writer = TextGenerator(run)
    written = [writer.generate(prompt, num_tokens=60, temperature=0.7, seed=0) for prompt in CLOSING_PROMPTS]
    return "\n\n".join(f"> {text.strip()}" for text in written)


@dataclass(frozen=True)
class Command:
    """A command of the trainer, with its own options."""

    run: Callable[[Namespace, Recipe], int]
    make_parser: Callable[[], RecipeParser]


def _list_runs(argv: list[str]) -> int:
    arguments = runs_parser().parse_args(argv)
    return list_runs(arguments.root.absolute(), as_json=arguments.json)


def _compare_runs(argv: list[str]) -> int:
    arguments = compare_parser().parse_args(argv)
    return compare_runs(arguments.root.absolute(), arguments.runs, as_json=arguments.json)


WITHOUT_RECIPE: dict[str, Callable[[list[str]], int]] = {RUNS: _list_runs, COMPARE: _compare_runs}
"""Commands that look at the runs of a root, and take no recipe."""
COMMANDS: dict[str, Command] = {
    "train": Command(train, lambda: train_parser([*(name for name in COMMANDS if name != "train"), *WITHOUT_RECIPE])),
    "plan": Command(plan, plan_parser),
    "doctor": Command(doctor, doctor_parser),
    "summary": Command(summary, summary_parser),
    "report": Command(report, report_parser),
    "sample": Command(print_sample, sample_parser),
    "evaluate": Command(evaluate, evaluate_parser),
    "export": Command(export_model, export_parser),
    "import": Command(import_model, import_parser),
    "inspect-checkpoint": Command(inspect_checkpoint, inspect_parser),
}
