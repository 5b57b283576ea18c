"""The program of a deploy Job, which names it `python -m k8s.controller.job DEPLOYMENT`.

It ends the Job, with 0 or 64, only when the deployment is over, or cannot be read; its exit code is in the outcome. On
everything else Kubernetes starts it again.
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
from k8s.objects.record import refuse_record
from services.common.errors import DeviceError

EXIT_START_AGAIN = 143
CONNECT_SECONDS = 120.0
# They say at each end of a log stream that a WebSocket closed. Each has set a level of its own, so `ray` is not enough.
TALKATIVE = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")


def main(text: str) -> int:
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        deployment = Deployment.from_json(text)
    except UnknownRecord as error:
        return _refuse(text, error)
    outcome = Reconciler(connect_patiently(), deployment, os.environ["POD_NAME"]).run()
    if outcome is None:
        return EXIT_START_AGAIN
    return 0 if outcome.exit_code == 0 else EXIT_ENDED_BADLY


def _refuse(text: str, error: UnknownRecord) -> int:
    """What this image cannot read it will not read after a restart either."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            outcome = refuse_record(connect_patiently(), text, error)
        except DeviceError as away:
            print(f"deploy: again in a second: {away}", file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                return EXIT_START_AGAIN
            time.sleep(1)
        else:
            print(f"deploy: {outcome.message} (exit code {outcome.exit_code})", flush=True)
            return EXIT_ENDED_BADLY


def connect_patiently() -> Api:
    """A pod's network may come a moment after the pod."""
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
    sys.exit(main(sys.argv[1]))
