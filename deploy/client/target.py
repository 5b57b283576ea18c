"""A target is a place where stages run: a KubeRay cluster, or AWS Batch. Both have the same commands and exit codes."""

from __future__ import annotations

from typing import Protocol, TextIO

from deploy.client.one_off_request import OneOffRequest
from deploy.client.request import DeployRequest
from services.common.recipe.schema import Stage


class Target(Protocol):
    """The commands of a person, or of CI. Every command returns an exit code.

    Commands raise `RecipeError` for a request that is wrong, and other `MillraceError`s where the target refuses it. A
    command that is interrupted leaves the stage that it watches running; only a one-off is stopped. With DRY_RUN=1
    nothing is changed, and `output` receives what would be applied.
    """

    def deploy(self, request: DeployRequest, output: TextIO | None) -> int:
        """Check the request, show the plan, deploy the stage, and follow it: the stage's own exit code."""
        ...

    def show_status(self) -> int:
        """Print which stages are deployed, their progress, and how their last deployments ended."""
        ...

    def show_log(self, stage: Stage) -> int:
        """Follow the log of a stage that runs, or print the log of its last deployment."""
        ...

    def stop(self, stage: Stage) -> int:
        """Let the stage commit a checkpoint, then remove it from the target."""
        ...

    def roll_back(self, request: DeployRequest, output: TextIO | None) -> int:
        """Deploy the previous image with which the stage succeeded.

        Recipe, options and nodes are those of the last deployment where the request has none.
        """
        ...

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        """Run a subcommand of a stage in a short job on a CPU node, and follow it: the subcommand's own exit code.

        Ctrl-C ends the job.
        """
        ...

    def run_pipeline(self, request: DeployRequest, output: TextIO | None) -> int:
        """Run the three stages in one view, one after the other, up to the first that fails: its exit code."""
        ...
