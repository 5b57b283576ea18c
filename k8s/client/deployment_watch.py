"""Follows a deployment: waits until the stage's image has accepted it, prints the output of its deploy Job, and returns
the stage's exit code.

A broken log stream is resumed. The exit code is read from the Job and not from its log.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.exit_codes import EXIT_AGAIN
from deploy.progress import ProgressPrinter, print_line
from k8s.client.pull_watch import PullWatch, explain_crash
from k8s.objects.api import Api, ApiUnreachable, Conflict, Object, is_pod_over
from k8s.objects.deploy_job import EXIT_ENDED_BADLY
from k8s.objects.deployment import Deployment
from k8s.objects.names import COMPONENT_LABEL, DEPLOYMENT_LABEL, STAGE_LABEL, job_name
from k8s.objects.placement import explain_start
from k8s.objects.record import Acceptance, Outcome, Record, end_unanswered, read_record
from services.common.errors import DeviceError, MillraceError

POLL_SECONDS = 1.0
LAST_LINES_SECONDS = 15.0
LEAST_SECONDS = 600.0
"""Shortest time limit of the stage's image, which may have to be pulled first, for its answer."""


class NotDeployed(MillraceError):
    """Preflight found problems: nothing was placed, and no node was added."""

    def __init__(self, message: str, exit_code: int = DeviceError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Watch:
    """Receives what a deployment that is followed prints, and its state."""

    take: Callable[[str], None] = print_line
    """Takes every line of the deploy Job's output."""
    look: Callable[[Record], object] = lambda record: None
    """Takes the deployment's record at every poll until the Job has ended."""


PRINTING = Watch()


def follow(api: Api, stage: str, deployment_id: str, watch: Watch = PRINTING) -> int:
    """Print the deploy Job's output until it has ended: its exit code. Interrupting this does not stop the stage."""
    output = PodOutput(api, f"{DEPLOYMENT_LABEL}={deployment_id}", "deploy", "deploy Job", watch.take)
    output.start()
    while True:
        try:
            record = _read_own(api, stage, deployment_id)
        except ApiUnreachable as error:
            print(f"deploy: {error}; the stage continues", file=sys.stderr)
            time.sleep(POLL_SECONDS)
            continue
        if record.is_over:
            output.finish()
            return _exit_code(record)
        watch.look(record)
        time.sleep(POLL_SECONDS)


def await_acceptance(api: Api, deployment: Deployment) -> Acceptance:
    """Wait until the stage's image has accepted the deployment, and report what it waits for, such as its pull.

    The time limit of the image begins when no earlier deployment's pod is at work. Raises `NotDeployed` where the image
    refuses, or will never answer: then the Job, which would wait on, is ended.
    """
    stage, pull = deployment.stage, PullWatch()
    limit = max(deployment.start_timeout_seconds, LEAST_SECONDS)
    deadline = time.monotonic() + limit
    report = ProgressPrinter(f"asking the {stage}'s image").report
    while True:
        problem, code = "", DeviceError.exit_code
        try:
            record = _read_own(api, stage, deployment.id)
            if record.acceptance:
                return record.acceptance
            if record.is_over:
                problem = record.outcome.message if record.outcome else ""
                code = _exit_code(record)
            found = api.find_all("Pod", f"{COMPONENT_LABEL}=deploy,{STAGE_LABEL}={stage}")
            own = [pod for pod in found if pod["metadata"]["labels"].get(DEPLOYMENT_LABEL) == deployment.id]
            older = [pod["metadata"]["name"] for pod in found if pod not in own and not is_pod_over(pod)]
            pods = [] if record.outcome else own
            waits, never = pull.look(api, record.uid, pods)
            if older:
                deadline = time.monotonic() + limit
                report(f"waits for pod {older[0]}, which works on {stage}, to end")
            elif pods:
                report(waits)
            crashes = (explain_crash(pod, (0, EXIT_ENDED_BADLY)) for pod in pods)
            problem = problem or next(filter(None, crashes), "") or never
            if record.is_over and not problem:
                problem = f"its Job ended without an outcome: {waits}"
            if not (problem or record.outcome) and time.monotonic() > deadline:
                problem, code = f"image {deployment.image} did not answer in time: {waits}", EXIT_AGAIN
            if problem and not record.is_over:
                end_unanswered(api, record, Outcome(code, problem))
        except Conflict:  # the image may have answered in between
            problem = ""
        except ApiUnreachable as error:
            problem = ""
            report(f"{error}; the Job continues")
        if problem:
            raise NotDeployed(f"{stage} is not deployed, and no node was added:\n  - {problem}", code)
        time.sleep(POLL_SECONDS)


def _read_own(api: Api, stage: str, deployment_id: str) -> Record:
    """The record of this deployment. Raises `DeviceError` where its Job is gone."""
    record = read_record(api, stage)
    if record is None:
        raise DeviceError(
            f"Job {job_name(stage)} is gone: somebody deleted it, which ends the stage. make stage-status shows the "
            f"pods that are left"
        )
    if record.deployment.id != deployment_id:
        raise DeviceError(
            f"{record.deployment.user} has deployed {stage} again meanwhile, so the end of this deployment is unknown: "
            f"make stage-status shows the new one"
        )
    return record


def _exit_code(record: Record) -> int:
    if record.outcome:
        return record.outcome.exit_code
    print("deploy: the Job ended without an outcome; make stop-stage removes its pods", file=sys.stderr)
    return EXIT_AGAIN


class PodOutput(threading.Thread):
    """A thread that copies the output of a Job's pods, every line once, also when a pod is replaced."""

    def __init__(
        self, api: Api, selector: str, container: str, what: str, take: Callable[[str], None] = print_line
    ) -> None:
        """`selector` has the labels of the pods, `what` names them in messages, and `take` receives every line."""
        super().__init__(name="output", daemon=True)
        self._api, self._selector, self._container = api, selector, container
        self._take = take
        self._printed: dict[str, str] = {}  # pod to the time stamp of its last line
        self._is_over = threading.Event()
        self._report = ProgressPrinter(what).report

    def finish(self, seconds: float = LAST_LINES_SECONDS) -> None:
        """Copy the last lines of ended pods, and stop, within so many seconds."""
        self._is_over.set()
        self.join(seconds)

    def run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            try:
                for pod in self._api.find_all("Pod", self._selector):
                    self._show(pod)
            except DeviceError as error:
                self._report(f"{error}; it continues")
            self._is_over.wait(POLL_SECONDS)

    def _show(self, pod: Object) -> None:
        if pod["status"].get("phase") == "Pending":
            self._report(f"its pod has not started: {explain_start(self._api, pod)}")
            return
        try:
            self._copy(pod["metadata"]["name"])
        except DeviceError as error:  # the exit code comes from the Job
            self._report(f"{error}; it continues")

    def _copy(self, pod: str) -> None:
        known = self._printed.get(pod, "")  # from an earlier stream; lines may share a time stamp
        for line in self._api.log(pod, self._container):
            stamp, _, text = line.partition(" ")
            if stamp > known:
                self._printed[pod] = stamp
                self._take(text)
