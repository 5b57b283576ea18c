"""Sends the notices of a deployment, and those that its stage's own processes have raised.

The pods of a stage reach no receiver and hold no secret: they append their notices to outboxes below the root, which
the deploy Job reads. Begin and end of a deployment are seen by the deploy Job alone, also where the driver was lost.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.exit_codes import is_tried_again
from k8s.controller.action import Action, EndAttempt, EndDeployment, StartAttempt
from k8s.controller.deployment_state import Awaited, State
from k8s.controller.history import RUN_DIGEST
from k8s.controller.observation import Observation
from k8s.objects.deployment import Deployment
from services.common.errors import TryAgain
from services.common.notices.channels import Channel
from services.common.notices.notice import Notice, name_occurrence
from services.common.notices.notifier import Notifier
from services.common.notices.outbox import OUTBOX_FILE
from services.common.notices.stage_notices import NOTICES_FOLDER
from services.common.recipe.schema import NoticeCondition

NO_CAPACITY_SECONDS = 600.0
"""Seconds of waiting for nodes after which a notice says so: nodes on demand take some 5 minutes to start."""


class DeploymentNotices:
    """Raises the notices of one deployment, each once, also after a restart of the deploy Job's pod."""

    def __init__(self, root: Path, deployment: Deployment, channels: list[Channel]) -> None:
        self._root, self._deployment = root, deployment
        self._subject = f"{deployment.stage} {deployment.recipe or 'deployment'} ({deployment.id})"
        outbox = root / NOTICES_FOLDER / f"deploy-{deployment.stage}-{deployment.id}.jsonl"
        self._notifier = Notifier(outbox, channels, relayed=self._find_outboxes)

    def observe(self, observation: Observation, action: Action) -> None:
        """Raise what follows from the action that is done next. Returns at once."""
        attempt, deployment = observation.attempt, self._deployment
        match action:
            case StartAttempt() if attempt == 1:
                self._raise("started", "", action.report)
            case EndAttempt(exit_code=code, message=message) if is_tried_again(code):
                self._raise("ended", str(attempt), f"attempt {attempt} ended with exit code {code}: {message}")
            case EndDeployment(outcome=outcome) if not outcome.exit_code:
                self._raise("done", "", outcome.message, report=self._find_report(observation))
            case EndDeployment(outcome=outcome):
                if observation.state is State.PLACING and outcome.exit_code == TryAgain.exit_code:
                    self._raise("no_capacity", str(attempt), outcome.message)
                tried = f" after {len(observation.record.attempts)} attempts"
                text = f"the deployment ended with exit code {outcome.exit_code}{tried}: {outcome.message}"
                self._raise("ended", "deployment", text, next_command=f"make deploy-stage STAGE={deployment.stage}")
        waited = observation.waited_for(Awaited.GANG)
        if waited > NO_CAPACITY_SECONDS:
            self._raise("no_capacity", str(attempt), f"attempt {attempt} waits for {waited:.0f} s: {action.report}")

    def set_aside(self, attempt: int, nodes: Mapping[str, str]) -> None:
        """Raise a notice for each node on which no attempt starts any more, with the reason by the node's name."""
        for name, reason in nodes.items():
            text = f"node {name} {reason}: no pod of the {self._deployment.stage} starts there"
            self._raise("node_set_aside", f"{name}/{attempt}", text)

    def close(self) -> None:
        self._notifier.close()

    def _raise(
        self, condition: NoticeCondition, key: str, text: str, *, report: str = "", next_command: str = ""
    ) -> None:
        self._notifier.raise_notice(
            Notice(
                condition,
                name_occurrence(condition, key),
                self._subject,
                text,
                report=report,
                next_command=next_command or "make stage-status",
            )
        )

    def _find_report(self, observation: Observation) -> str:
        runs = [self._root / "run" / run / "report.html" for run in observation.record.checkpoints]
        return str(runs[0]) if len(runs) == 1 else ""

    def _find_outboxes(self) -> Iterator[Path]:
        """Find the outboxes of the stage's processes. Raises `OSError`."""
        if self._deployment.stage == "trainer":
            return self._root.glob(f"run/{glob.escape(self._deployment.recipe)}-{RUN_DIGEST}/{OUTBOX_FILE}")
        return self._root.glob(f"{NOTICES_FOLDER}/{self._deployment.stage}-*.jsonl")
