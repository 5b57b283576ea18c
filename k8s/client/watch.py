"""The watch on a deployment from outside: it prints the deploy Job's output, and ends with the exit code.

The stream is a convenience: when it breaks it is taken up again, and the outcome is read from the Job, not from it.
"""

from __future__ import annotations

import sys
import threading
import time

from deploy.exit_codes import EXIT_AGAIN
from deploy.progress import Progress
from k8s.objects.api import Api, ApiUnreachable, Object
from k8s.objects.names import DEPLOYMENT_LABEL, job_name
from k8s.objects.placement import explain_start
from k8s.objects.record import Record, read_record
from services.common.errors import DeviceError

POLL_SECONDS = 1.0
LAST_LINES_SECONDS = 15.0


def follow(api: Api, stage: str, deployment_id: str) -> int:
    """Print the deploy Job's output until it has ended; its exit code. Leaving this changes nothing in the cluster."""
    output = _Output(api, deployment_id)
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


class _Output(threading.Thread):
    """Copies the output of the Job's pods, each line once, also over a pod that is replaced."""

    def __init__(self, api: Api, deployment_id: str) -> None:
        super().__init__(name="output", daemon=True)
        self._api, self._selector = api, f"{DEPLOYMENT_LABEL}={deployment_id}"
        self._printed: dict[str, str] = {}  # pod to the time stamp of its last line
        self._is_over = threading.Event()
        self._report = Progress("deploy").report

    def finish(self) -> None:
        """Take the last lines, and stop."""
        self._is_over.set()
        self.join(LAST_LINES_SECONDS)

    def run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            try:
                for pod in self._api.find_all("Pod", self._selector):
                    self._show(pod)
            except DeviceError as error:
                self._report(f"{error}; the stage goes on")
            self._is_over.wait(POLL_SECONDS)

    def _show(self, pod: Object) -> None:
        if pod["status"].get("phase") == "Pending":
            self._report(f"the deploy Job's pod has not begun: {explain_start(self._api, pod)}")
            return
        try:
            self._copy(pod["metadata"]["name"])
        except DeviceError as error:  # the outcome comes from the Job
            self._report(f"{error}; the stage goes on")

    def _copy(self, pod: str) -> None:
        for line in self._api.log(pod, "deploy"):
            stamp, _, text = line.partition(" ")
            if stamp > self._printed.get(pod, ""):
                self._printed[pod] = stamp
                print(text, flush=True)
