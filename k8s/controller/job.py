"""The program of a deploy Job, `python -m k8s.controller.job DEPLOYMENT`.

It ends with 0 or 64 only when the deployment has ended; the stage's exit code is in the outcome.
After every other exit code Kubernetes starts the program again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict

from k8s.controller.reconciler import Reconciler
from k8s.objects.api import Api, connect
from k8s.objects.deploy_job import EXIT_ENDED_BADLY
from k8s.objects.deployment import RECORD_VERSION, UPDATE_CLIENT, UPDATE_HEAD, Deployment, UnknownRecord
from k8s.objects.names import OUTCOME_ANNOTATION
from k8s.objects.record import Outcome, no_more_failures
from services.common.errors import DeviceError

EXIT_START_AGAIN = 143
CONNECT_SECONDS = 120.0
# These loggers report a closed WebSocket at each end of a log stream. All have levels of their own, so the level of
# `ray` does not reach them.
TALKATIVE = ("ray", "ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk")


def main(text: str) -> int:
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    api, pod = connect_patiently(), os.environ["POD_NAME"]
    try:
        deployment = Deployment.from_json(text)
    except UnknownRecord as error:
        end_unknown(api, pod, error)
        return EXIT_ENDED_BADLY
    outcome = Reconciler(api, deployment, pod).run()
    if outcome is None:
        return EXIT_START_AGAIN
    return 0 if outcome.exit_code == 0 else EXIT_ENDED_BADLY


def end_unknown(api: Api, pod: str, error: UnknownRecord) -> None:
    """End the Job of this pod, whose record another version wrote: nothing of its stage has been touched."""
    is_head_older = error.version > RECORD_VERSION
    older, update = ("the head's image", UPDATE_HEAD) if is_head_older else ("the client's checkout", UPDATE_CLIENT)
    message = (
        f"the head's image reads deployments of version {RECORD_VERSION}, but this one has version {error.version}; "
        f"{older} is older: {update}"
    )
    print(f"deploy: {message}", file=sys.stderr, flush=True)
    [owner] = (api.find("Pod", pod) or {})["metadata"]["ownerReferences"]
    job = api.find("Job", owner["name"]) or {}
    outcome = {OUTCOME_ANNOTATION: json.dumps(asdict(Outcome(error.exit_code, message)))}
    api.merge("Job", owner["name"], no_more_failures(job) | {"metadata": {"uid": owner["uid"], "annotations": outcome}})


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
    sys.exit(main(sys.argv[1]))
