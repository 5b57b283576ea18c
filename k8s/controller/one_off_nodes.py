"""Holds the node of a one-off while the one-off's Job runs, and gives it back afterwards.

A second Job runs `python -m k8s.controller.one_off_nodes JOB` for this, because a one-off has no rights in the cluster
and a client has no AWS account. The program is level-triggered and may be killed at any time: the Job's next pod goes
on, and the reaper gives back a node that no Job holds.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import asdict

from deploy.progress import Progress
from k8s.controller.job import EXIT_START_AGAIN, connect_patiently
from k8s.controller.node_pool import PatientRelease, open_node_pool
from k8s.objects.api import Api
from k8s.objects.names import OUTCOME_ANNOTATION, one_off_nodes_name
from k8s.objects.one_off_job import cpu_group_of, is_active
from k8s.objects.record import Outcome
from k8s.objects.worker_group import read_cluster
from services.common.errors import MillraceError
from services.common.process.entry_point import exit_code_of

POLL_SECONDS = 2.0
APPEAR_SECONDS = 120.0
"""Seconds in which the one-off's Job has to be there: the client makes it after this one's."""
LEAVE_SECONDS = 120.0
"""Seconds for which the pods of a one-off that is over are waited for, before the node under them is given back."""
ENDED = ("Succeeded", "Failed")  # phases of a pod whose containers have stopped
NODES = 1


class OneOffNodes:
    """Holds the node of one one-off."""

    def __init__(self, api: Api, one_off: str) -> None:
        self._api, self._one_off = api, one_off
        self._report = Progress("nodes").report
        group = cpu_group_of(read_cluster(api))
        self._pool = open_node_pool(api, one_off, group.node_pool, group.capacity_ends_at)
        self._release = PatientRelease(api, one_off, self._report)
        self._began = time.monotonic()
        self._is_seen = False
        self._over_since: float | None = None
        self._is_refused = False
        self.is_given_up = False
        """Somebody deleted this Job: the node goes whatever the one-off does."""

    def advance(self) -> bool:
        """Do the next thing. False once there is nothing left to do. Raises errors of the Kubernetes API and of EKS,
        after which it may be called again."""
        if not self._is_refused and not self.is_given_up:
            job = self._api.find("Job", self._one_off)
            self._is_seen = self._is_seen or job is not None
            if is_active(job):
                self._over_since = None
                self._hold()
                return True
            if self._is_leaving():
                return True
        return not self._release.advance()

    def _hold(self) -> None:
        state = self._pool.look(NODES)
        if state.refusal:
            self._report(state.refusal)
            outcome = json.dumps(asdict(Outcome(state.exit_code, state.refusal)))
            name = one_off_nodes_name(self._one_off)
            self._api.merge("Job", name, {"metadata": {"annotations": {OUTCOME_ANNOTATION: outcome}}})
            self._is_refused = True
        elif not state.is_raised:
            self._report(state.report)
            self._pool.hold(NODES)
        elif state.report:
            self._report(state.report)

    def _is_leaving(self) -> bool:
        """Is its Job still to come, or are its pods still on the node?"""
        now = time.monotonic()
        if not self._is_seen:
            return now - self._began < APPEAR_SECONDS
        self._over_since = now if self._over_since is None else self._over_since
        pods = self._api.find_all("Pod", f"job-name={self._one_off}")
        is_there = any((pod.get("status") or {}).get("phase") not in ENDED for pod in pods)
        return is_there and now - self._over_since < LEAVE_SECONDS


def main(one_off: str) -> int:
    """Until the node is given back. 143 when this pod was told to leave and another one goes on."""
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    api = connect_patiently()
    nodes = OneOffNodes(api, one_off)
    while True:
        try:
            if terminated.is_set() and not nodes.is_given_up:
                own = api.find("Job", one_off_nodes_name(one_off))
                if own and "deletionTimestamp" not in own["metadata"]:
                    return EXIT_START_AGAIN
                nodes.is_given_up = True
            if not nodes.advance():
                return 0
        except MillraceError as error:  # the API is away, EKS does not answer, somebody wrote in between
            print(f"nodes: again in {POLL_SECONDS:.0f} s: {error}", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS) if terminated.is_set() else terminated.wait(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1])))
