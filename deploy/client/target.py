"""A target: a kind of cluster that stages are deployed on. All do the same, in the same words and exit codes."""

from __future__ import annotations

from typing import Protocol, TextIO

from deploy.client.one_off import OneOffRequest
from deploy.client.request import DeployRequest
from services.common.recipe.schema import Stage


class Target(Protocol):
    """Commands of a person, or of CI. Each returns an exit code, and raises `MillraceError` for what cannot be.

    A command that is interrupted changes nothing of what it watches, and alone a one-off ends with it. `output` takes
    what would be sent, with DRY_RUN=1.
    """

    def deploy(self, request: DeployRequest, output: TextIO | None) -> int:
        """Check, show the plan, send it, and follow it to its end: the stage's own exit code."""
        ...

    def show_status(self) -> int:
        """What is deployed, where it stands, and how it ended."""
        ...

    def show_log(self, stage: Stage) -> int:
        """Follow a stage that is deployed, or print what the last deployment of it said."""
        ...

    def stop(self, stage: Stage) -> int:
        """Let the stage commit a checkpoint, and take it down."""
        ...

    def roll_back(self, request: DeployRequest, output: TextIO | None) -> int:
        """Deploy the image before, of those with which the stage ended well."""
        ...

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        """Run a subcommand of a stage in a short Job on a CPU node, follow it, and write the files that it brings: the
        subcommand's own exit code. Leaving it ends it."""
        ...

    def run_pipeline(self, request: DeployRequest, output: TextIO | None) -> int:
        """The three stages, one after the other, up to the first that fails."""
        ...
