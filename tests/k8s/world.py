"""A small world in memory, in which hours pass in a moment.

It plays what surrounds the deploy tool: an operator that makes and removes pods, a scheduler that places a gang or none
of it, nodes that are lost, and Ray. `tests/cluster` has the real ones.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from ray.job_submission import JobStatus

from k8s.controller.ray_jobs import DriverState, RayUnreachable
from k8s.controller.reaper import Reaper
from k8s.controller.reconciler import Reconciler
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import Deployment
from k8s.objects.names import PREFLIGHT_ANNOTATION
from k8s.objects.node_group import find_holder
from k8s.objects.placement import pods_of
from k8s.objects.record import Acceptance, Outcome, Record, read_record
from k8s.objects.worker_group import read_worker_group
from tests.k8s.builders import READY, Clock, deployment_of, node, pod
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, groups_of

Reconcile = Callable[..., Outcome]
POLL_SECONDS = 5.0
LONGEST_SECONDS = 10_000.0
DARK = ([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}], [{"type": "Ready", "status": "Unknown"}])


class World:
    """A trainer's worker group, some nodes with room for one pod each, and a Ray head."""

    def __init__(self, cluster: Thing, clock: Clock, nodes: int, pool: str = "") -> None:
        self.clock, self.pool = clock, pool
        self.api: Any = MemoryApi(copy.deepcopy(cluster))
        self.is_head_there = True
        self.drivers: dict[str, DriverState] = {}
        self.attempt: Callable[[int], DriverState | None] = lambda number: ended(0)
        self.watch: Callable[[], object] = lambda: None
        self.conditions = [READY]
        """The conditions that a placed pod gets."""
        self.ghosts: set[str] = set()
        """Addresses of pods that are gone, but that Ray still takes for alive."""
        self._pods_made = 0
        for number in range(nodes):
            self.set_node(f"n{number}", [], [READY])

    def set_node(self, name: str, taints: list[Thing], conditions: list[Thing]) -> None:
        made = node(name, taints, conditions)
        group = groups_of([self.api.find("RayCluster", "millrace") or {}])["trainer"]
        pod = group["template"]["spec"]
        made["metadata"]["labels"] = pod.get("nodeSelector") or {}
        made["status"]["allocatable"] = pod["containers"][0]["resources"]["requests"]
        if self.api.find("Node", name):
            self.api.merge("Node", name, made)
        else:
            self.api.create(made)

    def deploy(self, is_accepted: bool = True, **changes: Any) -> Deployment:
        """Create the deploy Job, with the answer of the stage's image where it has accepted."""
        settings: dict[str, Any] = {"arguments": (), "recipe": "small", "start_timeout_seconds": 1_800}
        settings["node_pool"] = self.pool
        deployment = deployment_of(**settings | changes)
        if self.api.find("Job", "deploy-trainer"):
            self.api.delete("Job", "deploy-trainer")
        job = render_deploy_job(read_worker_group(self.api, "trainer"), deployment)
        job["metadata"]["annotations"] = {PREFLIGHT_ANNOTATION: json.dumps(asdict(Acceptance()))} if is_accepted else {}
        self.api.create(job | {"status": {"failed": 2}})
        return deployment

    @property
    def record(self) -> Record:
        record = read_record(self.api, "trainer")
        assert record
        return record

    @property
    def holder(self) -> str:
        """The stage or one-off that holds the node group."""
        return find_holder(self.api, self.pool)

    @property
    def is_down(self) -> bool:
        """Whether nothing of the stage is left, and its worker group, if the RayCluster is there, has 0 replicas."""
        cluster = self.api.find("RayCluster", "millrace")
        left = [name for kind in ("Pod", "PodGroup", "Lease") for name in self.api.names(kind)]
        return not left and not (cluster and groups_of([cluster])["trainer"]["replicas"])

    def bound(self) -> list[str]:
        return sorted(each["spec"]["nodeName"] for each in self._pods() if each["spec"].get("nodeName"))

    def pass_time(self) -> None:
        self.clock.now += POLL_SECONDS
        assert self.clock.now < LONGEST_SECONDS, "it waits for ever"
        self._end_pods_on_live_nodes()
        self._evict_from_dark_nodes()
        self._operate()
        self._schedule()
        self._run_ray()
        self.watch()

    def _pods(self) -> list[Thing]:
        return pods_of(self.api, "trainer")

    def _is_up(self, name: str) -> bool:
        return (self.api.find("Node", name) or {"spec": {"taints": ["gone"]}})["spec"]["taints"] == []

    def _end_pods_on_live_nodes(self) -> None:
        for each in self._pods():
            where = each["spec"].get("nodeName")
            if "deletionTimestamp" in each["metadata"] and (not where or self._is_up(where)):
                self.api.delete("Pod", each["metadata"]["name"], grace_seconds=0)

    def _evict_from_dark_nodes(self) -> None:
        for each in self._pods():
            if each["spec"].get("nodeName") and not self._is_up(each["spec"]["nodeName"]):
                self.api.merge("Pod", each["metadata"]["name"], {"status": {"conditions": []}})
                self.api.delete("Pod", each["metadata"]["name"])

    def _operate(self) -> None:
        """Make and delete pods like KubeRay, for which terminating pods count."""
        cluster = self.api.find("RayCluster", "millrace")
        if cluster is None:
            return
        group, pods = groups_of([cluster])["trainer"], self._pods()
        for each in pods[group["replicas"] :]:
            self.api.delete("Pod", each["metadata"]["name"])
        for _ in range(group["replicas"] - len(pods)):
            self._pods_made += 1
            made = pod(f"trainer-{self._pods_made}", phase="Pending")
            made["spec"] = {"terminationGracePeriodSeconds": group["template"]["spec"]["terminationGracePeriodSeconds"]}
            self.api.create(made)

    def _schedule(self) -> None:
        """Place pods like Volcano: the whole gang or none of it."""
        gang = self.api.find("PodGroup", "millrace-trainer")
        pods = self._pods()
        standing = [each for each in pods if each["spec"].get("nodeName")]
        waiting = [each for each in pods if not each["spec"].get("nodeName")]
        taken = {each["spec"]["nodeName"] for each in standing}
        free = [name for name in self.api.names("Node") if name not in taken and self._is_up(name)]
        up = [each for each in standing if self._is_up(each["spec"]["nodeName"])]
        if gang is None or len(up) + min(len(free), len(waiting)) < gang["spec"]["minMember"]:
            return
        for each, name in zip(waiting, free, strict=False):
            patch = {"spec": {"nodeName": name}, "status": {"conditions": self.conditions, "podIP": name}}
            self.api.merge("Pod", each["metadata"]["name"], patch)

    def _run_ray(self) -> None:
        for name in self.api.names("RayJob"):
            number = int(name.rpartition("-")[2])
            if name not in self.drivers and (state := self.attempt(number)):
                self.drivers[name] = state
            state = self.drivers.get(name)
            if state and state.status.is_terminal():
                status = {"jobDeploymentStatus": "Complete", "jobStatus": str(state.status)}
                self.api.merge("RayJob", name, {"status": status})

    # These stand for the Jobs API of Ray.

    def find(self, name: str) -> DriverState | None:
        if not self.is_head_there:
            raise RayUnreachable("no head")
        return self.drivers.get(name)

    def stop(self, name: str) -> None:
        self.drivers[name] = DriverState(JobStatus.STOPPED, None, "", 1)

    def find_addresses(self, resource: str) -> set[str]:
        return {name for name in self.bound() if self._is_up(name)} | self.ghosts


class NoLog:
    """A driver's log that is not followed."""

    path = "nowhere"

    def __init__(self, jobs: object, job: str, started_at_ms: int, folder: object) -> None:
        self.submission = (job, started_at_ms)

    def close(self, timeout_seconds: float) -> None: ...

    def abandon(self) -> None: ...


def ended(exit_code: int, message: str = "millrace: done") -> DriverState:
    return DriverState(JobStatus.FAILED if exit_code else JobStatus.SUCCEEDED, exit_code, message, 1)


LOST = DriverState(JobStatus.FAILED, None, "the driver's node died", 1)
RUNNING = DriverState(JobStatus.RUNNING, None, "", 1)


class Gone(Exception):
    """Ends a deploy Job's process, which then does nothing more."""


def orphan(world: World, **changes: Any) -> None:
    """Let the process of a deploy Job end while its stage runs, and nobody start it again."""
    watch = world.watch

    def leave() -> None:
        watch()
        if len(world.bound()) == 2 and world.drivers:
            raise Gone

    world.watch = leave
    world.attempt = lambda number: RUNNING
    with pytest.raises(Gone):
        Reconciler(world.api, world.deploy(**changes), "pod").run()
    world.watch = watch


def reap(world: World, seconds: float, holder: str = "trainer") -> None:
    reaper = Reaper(world.api, holder)
    until = world.clock.now + seconds
    while reaper.advance() and world.clock.now < until:
        world.pass_time()


def complete_job(world: World, name: str = "deploy-trainer") -> None:
    world.api.merge("Job", name, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
