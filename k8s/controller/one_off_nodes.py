"""Holds the CPU node group while a one-off's Job runs, so that the one-off has a node, and releases it afterwards.

A second Job runs `python -m k8s.controller.one_off_nodes JOB` for this, because a one-off has no rights in the cluster
and a client has no AWS account. It may be killed at any time: the Job's next pod continues, or the reaper does.
"""

from __future__ import annotations

import sys
import time

from deploy.progress import ProgressPrinter
from k8s.controller.job import connect_patiently
from k8s.controller.node_pool import NodePool
from k8s.objects.api import Api, is_pod_over
from k8s.objects.one_off_job import cpu_group_of, is_active
from k8s.objects.worker_group import read_cluster
from services.common.errors import MillraceError
from services.common.process.entry_point import exit_code_of, run_main

POLL_SECONDS = 2.0
NODES = 1


class OneOffNodes:
    """Holds the node of one one-off."""

    def __init__(self, api: Api, one_off: str) -> None:
        self._api, self._one_off = api, one_off
        self._report = ProgressPrinter("nodes").report
        group = cpu_group_of(read_cluster(api))
        self._pool = NodePool(api, one_off, group.node_pool, self._report, group.capacity_ends_at)

    def advance(self) -> bool:
        """Take the next step. Returns False once no work is left.

        Raises errors of the Kubernetes API and of EKS, after which it may be called again.
        """
        job = self._api.find("Job", self._one_off)
        pods = [pod for pod in self._api.find_all("Pod", f"job-name={self._one_off}") if not is_pod_over(pod)]
        if is_active(job):
            state = self._pool.observe(NODES)
            self._report(state.refusal or state.report or "the node is ready")
            if not state.refusal:
                if not state.is_raised:
                    self._pool.hold(NODES)
                return True
            # Otherwise the node never comes: this Job ends, and the client deletes the other.
            if any(pod["spec"].get("nodeName") for pod in pods):
                return True
        elif pods:  # the reaper removes a pod whose node is lost
            return True
        return not self._pool.release()


def main(one_off: str) -> int:
    """Hold the node until it is given back."""
    nodes = OneOffNodes(connect_patiently(), one_off)
    while True:
        try:
            if not nodes.advance():
                return 0
        except MillraceError as error:  # the API or EKS does not answer, or another process wrote first
            print(f"nodes: trying again in {POLL_SECONDS:.0f} s: {error}", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_main(lambda words: main(words[0]), sys.argv[1:])))
