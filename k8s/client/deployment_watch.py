"""The watch on a deployment from outside: it prints the deploy Job's output, and ends with the exit code.

The stream is a convenience: when it breaks it is taken up again, and the outcome is read from the Job, not from it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from deploy.exit_codes import EXIT_AGAIN
from deploy.progress import Progress
from k8s.client.pull_watch import explain_wait
from k8s.objects.api import Api, ApiUnreachable, Object
from k8s.objects.names import DEPLOYMENT_LABEL, job_name
from k8s.objects.record import Record, read_record
from services.common.errors import DeviceError

POLL_SECONDS = 1.0
LAST_LINES_SECONDS = 15.0


def print_line(text: str) -> None:
    print(text, flush=True)


def follow(api: Api, stage: str, deployment_id: str) -> int:
    """Print the deploy Job's output until it has ended; its exit code. Leaving this changes nothing in the cluster."""
    output = PodOutput(api, f"{DEPLOYMENT_LABEL}={deployment_id}", "deploy", "deploy Job")
    output.start()
    while True:
        try:
            record = read_record(api, stage)
        except ApiUnreachable as error:
            print(f"deploy: {error}; the stage goes on without us", file=sys.stderr)
            time.sleep(POLL_SECONDS)
            continue
        if record and record.deployment.id != deployment_id:
            raise DeviceError(
                f"{stage} was deployed anew by {record.deployment.user} meanwhile, so how this deployment ended is not "
                f"known any more: make stage-status shows that one"
            )
        if record is None:
            raise DeviceError(
                f"Job {job_name(stage)} is gone: somebody deleted it, and its stage is taken down. "
                f"make stage-status shows what is left"
            )
        if record.is_over:
            output.finish()
            return _exit_code(record)
        time.sleep(POLL_SECONDS)


def _exit_code(record: Record) -> int:
    if record.outcome:
        return record.outcome.exit_code
    print("deploy: the Job ended without an outcome; make stop-stage takes down what it left", file=sys.stderr)
    return EXIT_AGAIN


class PodOutput(threading.Thread):
    """Copies the output of a Job's pods, each line once, also over a pod that is replaced."""

    def __init__(
        self, api: Api, selector: str, container: str, what: str, take: Callable[[str], None] = print_line
    ) -> None:
        """Of the pods with the labels of `selector`; `what` they are is told to people, and `take` gets each line."""
        super().__init__(name="output", daemon=True)
        self._api, self._selector, self._container = api, selector, container
        self._take = take
        self._printed: dict[str, str] = {}  # pod to the time stamp of its last line
        self._is_over = threading.Event()
        self._report = Progress(what).report

    def finish(self, seconds: float = LAST_LINES_SECONDS) -> None:
        """Take the last lines of pods that have ended, and stop; no longer than so many seconds."""
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
                self._report(f"{error}; it goes on")
            self._is_over.wait(POLL_SECONDS)

    def _show(self, pod: Object) -> None:
        if pod["status"].get("phase") == "Pending":
            self._report(f"its pod has not begun: {explain_wait(self._api, pod)}")
            return
        try:
            self._copy(pod["metadata"]["name"])
        except DeviceError as error:  # the outcome comes from the Job
            self._report(f"{error}; it goes on")

    def _copy(self, pod: str) -> None:
        known = self._printed.get(pod, "")  # by an earlier stream; lines of one may have the same stamp
        for line in self._api.log(pod, self._container):
            stamp, _, text = line.partition(" ")
            if stamp > known:
                self._printed[pod] = stamp
                self._take(text)
