"""The program of a deploy Job, `python -m k8s.controller.job DEPLOYMENT`.

It ends with 0 or 64 only when the deployment has ended; the stage's exit code is in the outcome.
After every other exit code Kubernetes starts the program again.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from k8s.controller.reconciler import Reconciler
from k8s.objects.api import Api, connect
from k8s.objects.deploy_job import EXIT_ENDED_BADLY
from k8s.objects.deployment import Deployment, UnknownRecord
from services.common.errors import DeviceError
from services.common.process.entry_point import run_main

EXIT_START_AGAIN = 143
CONNECT_SECONDS = 120.0
# These loggers report a closed WebSocket at each end of a log stream. All have levels of their own, so the level of
# `ray` does not reach them.
TALKATIVE = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")


def main(text: str) -> int:
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        deployment = Deployment.from_json(text)
    except UnknownRecord as error:  # the client prints it and ends the Job: nothing of the stage has been touched
        older = "the checkout that deploys (git pull) or, when no stage runs, the head (make cluster-up HEAD_TAG=...)"
        print(f"deploy: {error}: update {older}, whichever is older", file=sys.stderr, flush=True)
        return error.exit_code
    outcome = Reconciler(connect_patiently(), deployment, os.environ["POD_NAME"]).run()
    if outcome is None:
        return EXIT_START_AGAIN
    return 0 if outcome.exit_code == 0 else EXIT_ENDED_BADLY


def connect_patiently() -> Api:
    """Connect to the cluster, and try again while the network of this pod is still being set up."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return connect()
        except DeviceError as error:
            print(f"deploy: {error}", file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                sys.exit(EXIT_START_AGAIN)
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(run_main(lambda words: main(words[0]), sys.argv[1:]))
