"""The reaper takes down what no Job holds any more: stages whose deploy Job is gone, and node groups of ended one-offs.

The CronJob `reaper` runs `python -m k8s.controller.reaper` every 5 minutes. A stage is an orphan when its deploy Job
was deleted while its process was dead, or has failed, and it still has pods, a PodGroup, running RayJobs or a node
group; or when its run has ended, or should, and the next pod of its deploy Job never starts. The reaper takes it down
where no pod of a deploy Job works on it for `ORPHAN_SECONDS`. Pods of KEEP=1 stay while a deploy Job is there.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime

from deploy.progress import ProgressPrinter
from k8s.controller.job import connect_patiently
from k8s.controller.node_pool import NodePool
from k8s.objects.api import Api, ApiUnreachable, Conflict, Object
from k8s.objects.attempt import has_ended, rayjobs_of
from k8s.objects.lost_pods import LostPods
from k8s.objects.names import CLUSTER, STAGE_LABEL
from k8s.objects.node_group import read_leases
from k8s.objects.one_off_job import is_active
from k8s.objects.placement import pods_of
from k8s.objects.record import Record, find_passed_limit, read_record
from k8s.objects.teardown import deploy_pods_of, take_down
from k8s.objects.worker_group import worker_group_of
from services.common.errors import MillraceError
from services.common.process.entry_point import exit_code_of, run_main
from services.common.recipe.schema import STAGES

POLL_SECONDS = 2.0
ORPHAN_SECONDS = 120.0
"""Seconds after which an orphan is taken down: whoever ended or replaced its Job may be about to act on it."""
START_SECONDS = 900.0
"""Seconds in which a deploy pod starts, which may pull the stage's image; later it may be gone from its registry."""
RUN_SECONDS = 270.0  # the next run of the CronJob continues


class Reaper:
    """Takes down one stage, or releases the node group of one one-off, once nobody holds it."""

    def __init__(self, api: Api, holder: str) -> None:
        self._api, self._holder = api, holder
        self._report = ProgressPrinter(f"reaper: {holder}").report
        self._lost = LostPods(api, holder, self._report) if holder in STAGES else None
        self._pool = NodePool(api, holder, "", self._report)
        self._orphan_since: float | None = None

    def advance(self) -> bool:
        """Take the next step. Returns False when no further step is due."""
        is_orphan = self._is_orphan()
        lost = self._lost.remove(is_idle=is_orphan) if self._lost else 0
        if not is_orphan:
            self._orphan_since = None
            return lost > 0
        self._orphan_since = self._orphan_since or time.monotonic()
        if time.monotonic() - self._orphan_since < ORPHAN_SECONDS:
            self._report(f"no Job holds it: taking it down in {ORPHAN_SECONDS:.0f} s")
            return True
        if self._holder in STAGES and (left := take_down(self._api, self._holder)):
            self._report(f"taking it down, {left} RayJobs or pods left")
            return True
        if not self._pool.release():
            return True
        self._report("stopped")
        return False

    def _is_orphan(self) -> bool:
        """Whether something is left of a stage or one-off that no Job holds and nobody wants to keep."""
        has_nodes = any(lease.holder == self._holder for lease in read_leases(self._api))
        if self._holder not in STAGES:
            return has_nodes and not is_active(self._api.find("Job", self._holder))
        record, pods = read_record(self._api, self._holder), deploy_pods_of(self._api, self._holder)
        is_held = pods or (record and not record.is_over and not record.is_deleted)
        if is_held and not (record and self._is_stuck(record, pods)):
            return False
        cluster = self._api.find("RayCluster", CLUSTER)  # absent when somebody deleted it, and with it the pods
        has_pods = bool(
            pods_of(self._api, self._holder)
            or (cluster and worker_group_of(cluster, self._holder).replicas)
            or self._api.find_all("PodGroup", f"{STAGE_LABEL}={self._holder}")
        )
        kept = record.accepted if record else None
        if kept and kept.keep and has_pods:
            return False
        return has_nodes or has_pods or not all(map(has_ended, rayjobs_of(self._api, self._holder)))

    def _is_stuck(self, record: Record, pods: list[Object]) -> bool:
        """Whether no pod of the deploy Job starts, while nothing of the stage runs or should run any more."""
        if not (record.acceptance and pods and all(map(_never_starts, pods))):
            return False
        is_stopped = record.outcome or record.stop or find_passed_limit(record)
        return bool(is_stopped) or all(map(has_ended, rayjobs_of(self._api, self._holder)))


def _never_starts(pod: Object) -> bool:
    age = time.time() - datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()
    return (pod.get("status") or {}).get("phase") == "Pending" and age > START_SECONDS


def main() -> int:
    api = connect_patiently()
    one_offs = sorted({lease.holder for lease in read_leases(api)}.difference(STAGES))
    reapers = [Reaper(api, holder) for holder in (*STAGES, *one_offs)]
    deadline = time.monotonic() + RUN_SECONDS
    while sum(map(_advance, reapers)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return 0


def _advance(reaper: Reaper) -> bool:
    try:
        return reaper.advance()
    except MillraceError as error:  # it must not keep the reaper from the other stages
        print(f"reaper: {error}", file=sys.stderr, flush=True)
        return isinstance(error, ApiUnreachable | Conflict)  # these pass


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_main(lambda _: main(), sys.argv[1:])))
