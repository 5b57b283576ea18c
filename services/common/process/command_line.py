"""The commands of all programs, with typer: shared options, recipe overrides, and a stage's default command.

A command is a function, registered in an app, that returns its exit code:

    app = make_app()

    @app.command(cls=RecipeCommand)
    def summary(context: Context, recipe_path: RecipePath, root: Root = ROOT) -> int:
        '''Print what the three stages made.'''
        given = read_given(context, recipe_path, root)
        ...
        return 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from services.common.errors import RecipeError, shell_command
from services.common.launch.cluster_address import default_launcher
from services.common.launch.launcher import LAUNCHERS
from services.common.recipe.file import explain_word, load_recipe, read_override, read_overrides
from services.common.recipe.schema import Recipe

VERSION_HELP = "--version as the last word prints the version and the commit."


def make_app(group: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """Make an app without commands."""
    return typer.Typer(
        cls=group,
        add_completion=False,
        rich_markup_mode=None,
        epilog=VERSION_HELP,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def run_app(app: typer.Typer, argv: list[str], program: str) -> int:
    """Run the command that `argv` names, and return its exit code. `program` is its name in help and errors.

    Raises `RecipeError` with the usage for a wrong command line.
    """
    try:
        with typer.main.get_command(app).make_context(f"python -m {program}", list(argv)) as context:
            return context.command.invoke(context) or 0
    except typer.Exit as end:  # --help
        return end.exit_code
    except typer.TyperException as error:
        failed = getattr(error, "ctx", None)
        usage = f"\n{failed.get_usage()}" if failed else ""
        if failed and failed.parent:
            needs_recipe = any("--recipe" in each.opts and each.required for each in failed.command.params)
            words = shell_command(program, failed.info_name, "RECIPE" if needs_recipe else "")
            usage = usage.replace(failed.command_path, words)
        message = error.format_message().replace("option '--recipe'.", "RECIPE.").replace("Value error, ", "")
        raise RecipeError(f"{message}{usage}") from error


def one_of(names: Iterable[str]) -> Callable[[Any], Any]:
    """Make the callback of an option that takes one of `names`, or a list of them."""

    def check(value: Any) -> Any:
        for each in value if isinstance(value, list) else [value]:
            if each not in names:
                raise typer.BadParameter(f"{each!r} is not one of {', '.join(names)}.")
        return value

    return check


def positive(value: float | None) -> float | None:
    """Check an option that takes a number above 0."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a number above 0.")
    return value


ROOT = Path("fsx")
Context = typer.Context
RecipePath = Annotated[Path, typer.Option("--recipe", metavar="FILE", help="the recipe, or the run.json of a run")]
Root = Annotated[Path, typer.Option(metavar="DIR", callback=Path.absolute, help="folder of all artifacts")]
Launch = Annotated[
    str,
    typer.Option(
        metavar="inline|ray",
        callback=lambda name: one_of(LAUNCHERS)(name or default_launcher()),
        show_default=False,
        help="inline: start processes on this machine, without Ray; ray: use the Ray cluster of RAY_ADDRESS, or start "
        "Ray on this machine (default: ray where RAY_ADDRESS is set, else inline)",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the recipe and what follows from it, and exit")]
MetricsPort = Annotated[
    int | None, typer.Option(metavar="PORT", min=0, max=65_535, help="serve metrics for Prometheus; 0: any port")
]
MetricsHost = Annotated[str, typer.Option(metavar="HOST", help="address of --metrics-port")]


@dataclass(frozen=True)
class Given:
    """What every command with a recipe is given."""

    recipe: Recipe
    """The recipe with the overrides of the command line."""
    recipe_path: Path
    root: Path


def read_given(context: Context, recipe_path: Path, root: Path) -> Given:
    """Load the recipe with the overrides of the command line. Raises `RecipeError` for any other word that is left."""
    for word in context.args:
        if not read_override(word):
            context.fail(f"No such option or argument: {word}. {explain_word(word)}")
    return Given(load_recipe(recipe_path, read_overrides(context.args)), recipe_path, root)


class RecipeCommand(TyperCommand):
    """A command that takes recipe overrides. The help of a stage's default command lists the stage's other commands."""

    allow_extra_args = True
    ignore_unknown_options = True

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\nAny recipe value can be overridden: --train.max_steps=500\n")
        stage = ctx.parent.command if ctx.parent else None
        if isinstance(stage, StageGroup) and stage.list_commands(ctx)[0] == self.name:
            stage.format_commands(ctx.parent, formatter)
            formatter.write(f"\n{VERSION_HELP}\n")


class StageGroup(TyperGroup):
    """The commands of a stage, the first of which is meant where the command line begins with an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        default = self.list_commands(ctx)[:1] if not args or args[0].startswith("-") else []
        return super().parse_args(ctx, [*default, *args])
