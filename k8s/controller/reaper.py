"""The reaper takes down stages that no deploy Job holds any more.

The CronJob `reaper` runs `python -m k8s.controller.reaper` every quarter of an hour. A stage is orphaned when its
deploy Job was deleted with `--cascade=orphan`, has failed or was never created, while the stage still has pods, a
PodGroup or nodes of a pool. The reaper takes it down after `ORPHAN_SECONDS` in which nobody renewed its Lease. Stages
that were deployed with KEEP=1 stay. The reaper also gives back the node of a one-off whose Job has been over that long.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from deploy.progress import Progress
from k8s.controller.job import connect_patiently
from k8s.controller.node_pool import NodeRelease
from k8s.objects.api import Api, ApiUnreachable, Conflict
from k8s.objects.eks import EksUnreachable
from k8s.objects.lost_pods import LostPods
from k8s.objects.names import CLUSTER, KEEP_ANNOTATION, STAGE_LABEL, lease_name
from k8s.objects.node_shares import read_share_book
from k8s.objects.one_off_job import is_active
from k8s.objects.placement import pods_of
from k8s.objects.rayjob import has_ended, rayjobs_of
from k8s.objects.record import read_record
from k8s.objects.teardown import release_pods, stop_rayjobs
from k8s.objects.worker_group import worker_group_of
from services.common.errors import MillraceError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import STAGES

POLL_SECONDS = 2.0
ORPHAN_SECONDS = 120.0  # four times as long as a Lease holds
RUN_SECONDS = 840.0  # then the next run goes on


@dataclass(frozen=True)
class Observation:
    """What the reaper sees of a stage."""

    replicas: int
    pods: int
    rayjobs: int
    """That have not ended."""
    has_gang: bool
    nodes: int
    """That it holds of pools."""
    is_kept: bool
    is_held: bool
    """By a deploy Job that goes on."""
    lease: str
    """Its version, which changes while a process works on the stage; empty when there is none."""


def describe_orphan(observation: Observation) -> str:
    """What is left of a stage that nobody holds; empty when it is held, kept, or down."""
    if observation.is_held:
        return ""
    has_pods = bool(observation.pods or observation.replicas)
    nodes = f"{observation.nodes} nodes of its pool" if observation.nodes else ""
    if observation.is_kept:  # the pods that were to stay may have been taken down since
        return "" if has_pods or observation.has_gang else nodes
    parts = [
        f"{observation.pods} pods" if has_pods else "",
        f"{observation.rayjobs} RayJobs that run" if observation.rayjobs else "",
        "its PodGroup" if observation.has_gang else "",
        nodes,
    ]
    return ", ".join(filter(None, parts))


class StageReaper:
    """Watches one stage."""

    def __init__(self, api: Api, stage: str) -> None:
        self._api, self._stage = api, stage
        self._report = Progress(f"reaper: {stage}").report
        self._lost = LostPods(api, stage, self._report)
        self._nodes = NodeRelease(api, stage)
        self._seen: tuple[str, float] = ("", 0.0)  # the Lease's version, and since when it is an orphan with that one

    def advance(self) -> bool:
        """Do the next thing. False when there is nothing to do, or to wait for."""
        observation = self._observe()
        orphan = describe_orphan(observation)
        lost = self._lost.remove(is_idle=bool(orphan))
        if not orphan:
            self._seen = ("", 0.0)
            return lost > 0
        version = f"lease {observation.lease}"
        if self._seen[0] != version:
            self._seen = (version, time.monotonic())
            self._report(f"no deploy Job holds {orphan}")
        if time.monotonic() - self._seen[1] < ORPHAN_SECONDS:
            return True
        left = stop_rayjobs(self._api, self._stage) or release_pods(self._api, self._stage)
        waits = f"taking it down, {left} left" if left else self._nodes.advance()
        self._report(waits or "is down: no pods, no gang")
        if not waits:
            self._api.delete("Lease", lease_name(self._stage))
        return bool(waits)

    def _observe(self) -> Observation:
        cluster = self._api.find("RayCluster", CLUSTER)  # somebody may have deleted it, and with it the pods
        record = read_record(self._api, self._stage)
        gangs = self._api.find_all("PodGroup", f"{STAGE_LABEL}={self._stage}")
        lease = self._api.find("Lease", lease_name(self._stage))
        marks = [(gang["metadata"].get("annotations") or {}).get(KEEP_ANNOTATION) for gang in gangs]
        return Observation(
            replicas=worker_group_of(cluster, self._stage).replicas if cluster else 0,
            pods=len(pods_of(self._api, self._stage)),
            rayjobs=sum(not has_ended(job) for job in rayjobs_of(self._api, self._stage)),
            has_gang=bool(gangs),
            nodes=sum(shares.nodes.get(self._stage, 0) for shares in read_share_book(self._api).pools.values()),
            is_kept="1" in marks or bool(record and record.is_over and record.deployment.keep),
            is_held=bool(record and not record.is_over and not record.is_deleted),
            lease=lease["metadata"]["resourceVersion"] if lease else "",
        )


class OneOffReaper:
    """Watches the nodes that one-offs hold: the Job that gives one back may be gone, or its process killed."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._report = Progress("reaper").report
        self._over_since: dict[str, float] = {}

    def advance(self) -> bool:
        """Do the next thing. False when there is nothing to do, or to wait for."""
        held = {holder for shares in read_share_book(self._api).pools.values() for holder in shares.nodes}
        orphans = [each for each in held.difference(STAGES) if not is_active(self._api.find("Job", each))]
        now = time.monotonic()
        self._over_since = {each: self._over_since.get(each, now) for each in sorted(orphans)}
        for each, since in self._over_since.items():
            if now - since >= ORPHAN_SECONDS:
                left = NodeRelease(self._api, each).advance()
                self._report(f"{each}: {left or 'its node is given back'}")
        return bool(orphans)


class _Reaper(Protocol):
    def advance(self) -> bool: ...


def main() -> int:
    api = connect_patiently()
    reapers: list[_Reaper] = [*(StageReaper(api, stage) for stage in STAGES), OneOffReaper(api)]
    deadline = time.monotonic() + RUN_SECONDS
    while sum(map(_advance, reapers)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return 0


def _advance(reaper: _Reaper) -> bool:
    try:
        return reaper.advance()
    except MillraceError as error:  # of this one alone, such as a record that cannot be read
        print(f"reaper: {error}", file=sys.stderr, flush=True)
        # Somebody wrote in between, or what is asked does not answer at the moment.
        return isinstance(error, ApiUnreachable | Conflict | EksUnreachable)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
