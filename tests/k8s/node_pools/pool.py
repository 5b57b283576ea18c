"""Steps that the tests of node pools share: hold nodes, give them back, look who holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.job_submission import JobStatus

from k8s.controller.node_pool import NodeRelease, open_node_pool
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import StageReaper
from k8s.objects.node_shares import read_share_book
from tests.k8s.cloud import POOL
from tests.k8s.world import World

RUNNING = DriverState(JobStatus.RUNNING, None, "", 1)


class Killed(BaseException):
    """SIGKILL."""


class Mortal:
    """The API for a process that is killed after its n-th write, of whatever kind."""

    def __init__(self, api: Any, writes: int) -> None:
        self._api, self._left = api, writes

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._api, name)
        return self.counted(call) if name in ("create", "merge", "replace", "delete") else call

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            done = call(*arguments, **options)
            self._left -= 1
            if self._left == 0:
                raise Killed
            return done

        return write


def held(world: World) -> dict[str, int]:
    """Nodes of the pool, by the stage that holds them."""
    shares = read_share_book(world.api).pools.get(POOL)  # type: ignore[arg-type]
    return shares.nodes if shares else {}


def is_down(world: World) -> bool:
    has_lease = world.api.find("Lease", "stage-trainer") is not None
    return not (held(world) or world.api.names("Pod") or world.api.names("PodGroup") or has_lease)


def reap(world: World, seconds: float) -> None:
    stage_reaper = StageReaper(world.api, "trainer")  # type: ignore[arg-type]
    until = world.clock.now + seconds
    while stage_reaper.advance() and world.clock.now < until:
        world.pass_time()


def hold(world: World, stage: str, nodes: int) -> None:
    pool = open_node_pool(world.api, stage, POOL)  # type: ignore[arg-type]
    while not pool.look(nodes).is_raised:
        pool.hold(nodes)


def give_back(world: World, stage: str) -> None:
    release = NodeRelease(world.api, stage)  # type: ignore[arg-type]
    while release.advance():
        pass
