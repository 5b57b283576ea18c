"""The commands of the trainer stage, which turns corpus/5 and compile_cache/1 into checkpoint/4 and run/1.

`python -m services.trainer [COMMAND] --recipe FILE`; `train` is the default. A command imports what needs torch once
its command line is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
import typer.models
from pydantic import ValidationError

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.store import open_artifact
from services.common.errors import adding_path
from services.common.hardware.image_platform import require_backend
from services.common.launch.metrics_export import export_metrics
from services.common.process.command_line import (
    ROOT,
    Context,
    DryRun,
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
from services.common.process.entry_point import importing
from services.common.process.progress import reporting_progress
from services.common.process.telemetry import configure_logging
from services.common.recipe.derived import describe
from services.common.recipe.schema import fingerprint
from services.trainer.checkpoints.lookup import verify_sizes
from services.trainer.command_inputs import (
    find_own_corpus,
    new_job,
    open_checkpoint_of,
    open_evaluated,
    open_job,
    open_own_corpus,
)
from services.trainer.conversion.configuration import Dtype
from services.trainer.inspection.fit import require_fit
from services.trainer.inspection.goodput import NODE_MTBF_HOURS, NODE_WAIT_MINUTES
from services.trainer.inspection.run_plan import Assumptions, describe_plan
from services.trainer.job import ALLOW_CHANGED_PROGRAM, ALLOW_COLD_COMPILE, RUN_FILE, Job, RunCorpus
from services.trainer.metrics.trackers import TRACKERS, require_trackers, tracking
from services.trainer.report.comparison import compare_runs
from services.trainer.report.run_report import write_report
from services.trainer.runs.description import write_run
from services.trainer.runs.run import Run, open_run, open_started_run
from services.trainer.runs.start import describe_start
from services.trainer.runs.status import list_runs
from services.trainer.runs.summary import summarize
from services.trainer.workers.start import prestart_workers

CLOSING_PROMPTS = ("If the", "Return a", "The method")

RunName = Annotated[str, typer.Argument(metavar="RUN", help="name of the run, or a unique prefix of it")]
Corpus = Annotated[Path | None, typer.Option("--corpus", help="corpus folder (default: the newest of this recipe)")]
Cache = Annotated[Path | None, typer.Option(help="compile cache folder (default: the cache of this program)")]
AllowColdCompile = Annotated[bool, typer.Option(ALLOW_COLD_COMPILE, help="compile at the start if there is no cache")]
Step = Annotated[int | None, typer.Option(help="step of the checkpoint (default: the newest that verifies)")]
AsJson = Annotated[bool, typer.Option("--json", help="print one line of JSON for each run instead of a table")]
Sample = Annotated[bool, typer.Option("--sample", help="load the model and add a sample of its writing")]


def _assume(name: str) -> typer.models.OptionInfo:
    return typer.Option(help=Assumptions.model_fields[name].description, show_default=False)


app = make_app(StageGroup)


@app.callback()
def prepare() -> None:
    configure_logging("trainer")


def main(argv: list[str]) -> int:
    return run_app(app, argv, "services.trainer")


@app.command(cls=RecipeCommand)
@reporting_progress("trainer")
def train(
    context: Context,
    recipe_path: RecipePath,
    root: Root = ROOT,
    launch: Launch = "",
    corpus_path: Corpus = None,
    cache: Cache = None,
    allow_cold_compile: AllowColdCompile = False,
    allow_changed_program: Annotated[
        bool, typer.Option(ALLOW_CHANGED_PROGRAM, help="continue a checkpoint that another program made")
    ] = False,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    tracker: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            callback=require_trackers,
            help=f"send metrics to an experiment tracker ({', '.join(TRACKERS)}); may be repeated",
        ),
    ] = [],  # noqa: B006
    dry_run: DryRun = False,
) -> int:
    """Train the recipe's model to train.max_steps, from the newest checkpoint on."""
    given = read_given(context, recipe_path, root)
    recipe = given.recipe
    if dry_run:
        corpus = find_own_corpus(given, corpus_path)
        known = describe_start(given.root, recipe, corpus)
        print(describe(recipe, corpus.payloads if isinstance(corpus, RunCorpus) else None, known))
        return 0
    require_backend(recipe.parallel.device)
    with importing():
        prestart_workers(recipe, launch)
        from services.trainer.metrics.prometheus import RunCollector
        from services.trainer.training import train_run
    job = open_job(given, open_own_corpus(given, corpus_path), cache, launch, allow_cold_compile=allow_cold_compile)

    @contextmanager
    def export(job: Job) -> Iterator[None]:
        with export_metrics([RunCollector(job)], root, launch, metrics_port, metrics_host), tracking(job, tracker):
            yield

    return train_run(replace(job, allows_changed_program=allow_changed_program), recipe_path, export)


@app.command(cls=RecipeCommand)
def plan(
    context: Context,
    recipe_path: RecipePath,
    root: Root = ROOT,
    corpus_path: Corpus = None,
    mfu: Annotated[float | None, _assume("mfu")] = None,
    storage_gb_per_second: Annotated[float | None, _assume("storage_gb_per_second")] = None,
    node_mtbf_hours: Annotated[float, _assume("node_mtbf_hours")] = NODE_MTBF_HOURS,
    dollars_per_node_hour: Annotated[float | None, _assume("dollars_per_node_hour")] = None,
    node_wait_minutes: Annotated[float, _assume("node_wait_minutes")] = NODE_WAIT_MINUTES,
    nodes: Annotated[list[int], _assume("nodes")] = [],  # noqa: B006
) -> int:
    """Estimate memory, time, cost and checkpoints of a run before it starts.

    Ends with 2 if a worker needs more memory than its device has.
    """
    given = read_given(context, recipe_path, root)
    corpus = find_own_corpus(given, corpus_path)
    try:
        assumptions = Assumptions.model_validate({name: context.params[name] for name in Assumptions.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        context.fail(f"--{first['loc'][0]}".replace("_", "-") + f" {first['input']}: {first['msg']}.")
    print(
        describe_plan(given.recipe, corpus.payloads if isinstance(corpus, RunCorpus) else None, assumptions), flush=True
    )
    require_fit(given.recipe)
    return 0


@app.command("doctor", cls=RecipeCommand)
def run_doctor(
    context: Context,
    recipe_path: RecipePath,
    root: Root = ROOT,
    launch: Launch = "",
    corpus_path: Corpus = None,
    cache: Cache = None,
    quick: Annotated[bool, typer.Option("--quick", help="compare sizes of files instead of checksums")] = False,
) -> int:
    """Check all requirements of a run and print the next steps."""
    given = read_given(context, recipe_path, root)
    with importing():
        from services.trainer.inspection.doctor import doctor
    return doctor(given, launch, corpus_path, cache, "size" if quick else "full")


@app.command()
def summary(run_name: RunName, root: Root = ROOT) -> int:
    """Print what the three stages made, and a sample of the model's writing."""
    run = open_run(root, run_name)
    print(summarize(run))
    print(f"\nThe model writes:\n{closing_sample(run)}")
    return 0


@app.command()
def report(run_name: RunName, root: Root = ROOT, sample: Sample = False) -> int:
    """Write report.html with the run's curves into the run's folder.

    The run may be going on. Before its first checkpoint there is no model for a sample.
    """
    if sample:
        run = open_run(root, run_name)
        print(write_report(run, closing_sample(run)))
    else:
        print(write_report(open_started_run(root, run_name, verify_sizes)))
    return 0


@app.command("sample")
def print_sample(
    context: Context,
    run_name: RunName,
    root: Root = ROOT,
    prompt: Annotated[str, typer.Option(help="text to continue (default: start a document)")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="most tokens to write")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the random choices")] = 0,
) -> int:
    """Let the newest checkpoint continue a prompt."""
    if not 0 <= temperature < float("inf"):
        context.fail(f"--temperature {temperature} is not a number of at least 0.")
    with importing():
        from services.trainer.inspection.sample import TextGenerator
    print(TextGenerator(open_run(root, run_name)).generate(prompt, tokens, temperature, seed))
    return 0


@app.command(cls=RecipeCommand)
def evaluate(
    context: Context,
    run_name: RunName,
    root: Root = ROOT,
    launch: Launch = "",
    corpus_path: Annotated[
        Path | None,
        typer.Option("--corpus", help="corpus to evaluate, of the same tokenizer (default: those of the run)"),
    ] = None,
    step: Step = None,
    checkpoint_path: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FOLDER", help="checkpoint of any run of the same model"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="evaluate N targets of a fixed permutation (default: the whole split)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one line of JSON instead of a table")] = False,
    cache: Cache = None,
    allow_cold_compile: AllowColdCompile = False,
) -> int:
    """Evaluate a checkpoint on a corpus's validation split. It writes nothing into a run, and may run beside one."""
    if step is not None and checkpoint_path:
        context.fail("--step and --checkpoint exclude each other.")
    run = open_started_run(root, run_name, verify_sizes)
    given = read_given(context, run.folder / RUN_FILE, root)
    require_backend(given.recipe.parallel.device)
    with importing():
        prestart_workers(given.recipe, launch)
        from services.trainer.evaluation.checkpoint import describe_table, evaluate_checkpoint
    if checkpoint_path:
        checkpoint = open_artifact(checkpoint_path.absolute(), CheckpointManifest)
        verify_sizes(checkpoint)
    else:
        checkpoint = open_checkpoint_of(run, step, "size")
    job = open_job(given, open_evaluated(given, run, corpus_path), cache, launch, allow_cold_compile=allow_cold_compile)
    record = evaluate_checkpoint(job, checkpoint, tokens)
    print(json.dumps(record) if as_json else describe_table(record))
    return 0


@app.command("export")
def export_model(
    context: Context,
    run_name: RunName,
    output: Annotated[Path, typer.Option(help="folder to make; it must not exist")],
    root: Root = ROOT,
    average_last: Annotated[
        int, typer.Option(metavar="K", min=1, help="write the mean of the weights of the last K checkpoints")
    ] = 1,
    dtype: Annotated[Dtype, typer.Option(help="type of the weights")] = "float32",
    keep_padding: Annotated[
        bool, typer.Option("--keep-padding", help="write the embedding rows past the tokenizer's ids, too")
    ] = False,
    format: Annotated[Literal["hugging-face", "nxd"], typer.Option()] = "hugging-face",
    tensor_parallel_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="nxd: number of ranks, one file for each")
    ] = None,
    kv_size_multiplier: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="nxd: copies of key-value heads (default: 1)")
    ] = None,
    qkv_linear: Annotated[
        bool, typer.Option("--qkv-linear", help="nxd: attention has a GQAQKVColumnParallelLinear")
    ] = False,
    fuse_qkv: Annotated[
        bool, typer.Option("--fuse-qkv", help="nxd: attention has one matrix for queries, keys and values")
    ] = False,
) -> int:
    """Write the newest checkpoint as a Hugging Face folder or as an NxD checkpoint.

    The options of an NxD checkpoint are equal to those of the run that loads it.
    """
    nxd = None
    if format == "nxd":
        if tensor_parallel_size is None:
            context.fail("--format nxd needs --tensor-parallel-size, which is that of the run that loads it.")
        if average_last > 1:
            context.fail("--average-last applies to --format hugging-face only: an NxD checkpoint continues a run.")
        with importing():
            from services.trainer.conversion.nxd.layout import NxdLayout
        nxd = NxdLayout(tensor_parallel_size, kv_size_multiplier or 1, qkv_linear, fuse_qkv)
    elif tensor_parallel_size or kv_size_multiplier or qkv_linear or fuse_qkv:
        context.fail("--tensor-parallel-size, --kv-size-multiplier, --qkv-linear and --fuse-qkv need --format nxd.")
    with importing():
        from services.trainer.conversion.export import export
    print(
        export(open_run(root, run_name), output, nxd, average_last=average_last, dtype=dtype, keep_padding=keep_padding)
    )
    return 0


@app.command("import", cls=RecipeCommand)
def import_model(
    context: Context,
    recipe_path: RecipePath,
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Hugging Face folder of a Llama or Qwen3, folder of an NxD checkpoint's tag, or folder of a DCP "
            "checkpoint's step",
        ),
    ],
    root: Root = ROOT,
    corpus_path: Corpus = None,
) -> int:
    """Start a run with the weights of a Hugging Face folder, or of an NxD or a DCP checkpoint (torchtitan's)."""
    given = read_given(context, recipe_path, root)
    with importing():
        from services.common.program.fingerprint import program_facts
        from services.trainer.conversion.weight_import import import_weights
    corpus, program = open_own_corpus(given, corpus_path), fingerprint(program_facts(given.recipe))
    job = new_job(given.root, given.recipe, corpus, None, program)
    with hold_lock(job.lock), adding_path(job.root):
        print(import_weights(job, source))
        write_run(job)
    return 0


@app.command("inspect-checkpoint")
def inspect_checkpoint(run_name: RunName, root: Root = ROOT, step: Step = None) -> int:
    """Print the metadata and the tensors of a checkpoint."""
    run = open_started_run(root, run_name, verify_sizes)
    with importing():
        from services.trainer.inspection.checkpoint_content import inspect
    for line in inspect(open_checkpoint_of(run, step, "full"), run.recipe):
        print(line)
    return 0


@app.command()
def runs(root: Root = ROOT, as_json: AsJson = False) -> int:
    """List the runs of a root, each branch below its parent: state, step, loss, tokens/s, cost and age.

    The loss is in nats per token, the cost that of the nodes that were held by on-demand prices.
    """
    return list_runs(root, as_json=as_json)


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="names of runs, or prefixes of several")],
    root: Root = ROOT,
    as_json: AsJson = False,
) -> int:
    """Compare runs: newest numbers, the recipe values in which they differ, and curves in comparison.html."""
    return compare_runs(root, names, as_json=as_json)


def closing_sample(run: Run) -> str:
    """Let the model continue CLOSING_PROMPTS. This needs the memory of the model in float32."""
    with importing():
        from services.trainer.inspection.sample import TextGenerator
    writer = TextGenerator(run)
    written = [writer.generate(prompt, num_tokens=60, temperature=0.7, seed=0) for prompt in CLOSING_PROMPTS]
    return "\n\n".join(f"> {text.strip()}" for text in written)
