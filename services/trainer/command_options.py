"""Defines the options of the trainer's commands, one parser for each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from services.common.process.command_line import RecipeParser, StageParser
from services.common.process.command_parser import CommandParser
from services.trainer.conversion.export import ALLOW_NON_FINITE_WEIGHTS, DTYPES
from services.trainer.inspection.run_plan import add_assumptions
from services.trainer.job import ALLOW_CHANGED_PROGRAM, ALLOW_COLD_COMPILE
from services.trainer.metrics.trackers import TRACKERS

_REPORT = "Write report.html with the run's curves into the run's folder."


def _parser(command: str, description: str) -> RecipeParser:
    parser = RecipeParser(f"trainer {command}", description)
    parser.add_argument("--corpus", type=Path, help="corpus folder (default: the newest of this recipe)")
    return parser


def train_parser(other_commands: Iterable[str]) -> RecipeParser:
    """Make the parser of the command `train`, whose help names the other commands."""
    parser = StageParser("trainer", "Train the recipe's model to train.max_steps, from the newest checkpoint on.")
    parser.epilog = f"{parser.epilog}. Other commands, each with its own --help: {', '.join(other_commands)}"
    parser.add_launch()
    parser.add_argument("--corpus", type=Path, help="corpus folder (default: the newest of this recipe)")
    _add_cache(parser)
    parser.add_argument(
        ALLOW_CHANGED_PROGRAM, action="store_true", help="continue a checkpoint that another program made"
    )
    parser.add_metrics_port()
    parser.add_argument(
        "--tracker",
        action="append",
        default=[],
        choices=TRACKERS,
        help="send metrics to Weights & Biases",
    )
    return parser


def plan_parser() -> RecipeParser:
    parser = _parser("plan", "Estimate memory, time, cost and checkpoints of a run before it starts.")
    add_assumptions(parser)
    return parser


def summary_parser() -> RecipeParser:
    return _parser("summary", "Print what the three stages made, and a sample of the model's writing.")


def report_parser() -> RecipeParser:
    parser = _parser("report", f"{_REPORT} --run NAME takes the place of --recipe.")
    _add_sample(parser)
    return parser


def named_report_parser() -> CommandParser:
    """Make the parser of the command `report` for a run that is named, whose recipe its folder has."""
    parser = CommandParser(prog="python -m services.trainer report", description=_REPORT, allow_abbrev=False)
    parser.add_argument("--run", required=True, metavar="NAME", help="name of the run, or the unique begin of a name")
    parser.add_root()
    _add_sample(parser)
    return parser


def _add_sample(parser: CommandParser) -> None:
    parser.add_argument("--sample", action="store_true", help="load the model and add a sample of its writing")


def runs_parser(command: str = "runs", description: str = "List the runs of a root as a tree.") -> CommandParser:
    parser = CommandParser(prog=f"python -m services.trainer {command}", description=description, allow_abbrev=False)
    parser.add_root()
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each run instead")
    return parser


def compare_parser() -> CommandParser:
    parser = runs_parser("compare", "Compare runs of a root: newest numbers, differing recipe values, curves.")
    parser.add_argument("--runs", required=True, metavar="NAME,NAME", help="names of runs, or unique prefixes of names")
    return parser


def sample_parser() -> RecipeParser:
    parser = _parser("sample", "Let the newest checkpoint continue a prompt.")
    parser.add_argument("--prompt", default="", help="text to continue (default: begin a document)")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to write (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    return parser


def evaluate_parser() -> RecipeParser:
    parser = RecipeParser(
        "trainer evaluate",
        "Evaluate a checkpoint on a corpus's validation split. It writes nothing into a run, and may run beside one.",
    )
    parser.add_launch()
    parser.add_argument(
        "--corpus", type=Path, help="corpus to evaluate, of the same vocabulary (default: the newest of this recipe)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="step of the checkpoint (default: the newest of the recipe's run)")
    which.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="checkpoint of any run of the recipe's model")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="evaluate N targets of a fixed permutation (default: the whole split)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    _add_cache(parser)
    return parser


def _add_cache(parser: RecipeParser) -> None:
    parser.add_argument("--cache", type=Path, help="compile cache folder (default: the cache of this program)")
    parser.add_argument(ALLOW_COLD_COMPILE, action="store_true", help="compile at the start if there is no cache")


def export_parser() -> RecipeParser:
    parser = _parser("export", "Write the newest checkpoint as a Hugging Face folder or as an NxD checkpoint.")
    parser.add_argument("--output", type=Path, required=True, help="folder to make; it must not exist")
    parser.add_argument(
        "--average-last",
        type=int,
        default=1,
        metavar="K",
        help="write the mean of the weights of the last K checkpoints (default: %(default)s, the newest alone)",
    )
    parser.add_argument(ALLOW_NON_FINITE_WEIGHTS, action="store_true", help="export NaN and infinite weights as well")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="type of the weights (default: %(default)s)"
    )
    formats = ("hugging-face", "nxd")
    parser.add_argument("--format", choices=formats, default=formats[0], help="(default: %(default)s)")
    nxd = parser.add_argument_group("options of --format nxd, equal to those of the run that loads the checkpoint")
    nxd.add_argument("--tensor-parallel-size", type=int, metavar="N", help="number of ranks, one file for each")
    nxd.add_argument("--kv-size-multiplier", type=int, metavar="N", help="copies of key-value heads (default: 1)")
    nxd.add_argument("--qkv-linear", action="store_true", help="attention has a GQAQKVColumnParallelLinear")
    nxd.add_argument("--fuse-qkv", action="store_true", help="attention has one matrix for queries, keys and values")
    return parser


def import_parser() -> RecipeParser:
    parser = _parser(
        "import",
        "Begin a run with the weights of a Hugging Face folder, or of an NxD or a DCP checkpoint (torchtitan's).",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        required=True,
        help="Hugging Face folder of a Llama, folder of an NxD checkpoint's tag, or folder of a DCP checkpoint's step",
    )
    return parser


def inspect_parser() -> RecipeParser:
    parser = _parser("inspect-checkpoint", "Print the metadata and the tensors of a checkpoint.")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest that verifies)")
    return parser
