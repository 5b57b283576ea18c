"""Steps that the tests of node pools share: hold nodes, give them back, kill who does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.controller.node_pool import open_node_pool
from tests.k8s.cloud import POOL
from tests.k8s.world import World


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


def hold(world: World, stage: str, nodes: int) -> None:
    pool = open_node_pool(world.api, stage, POOL)  # type: ignore[arg-type]
    while not pool.look(nodes).is_raised:
        pool.hold(nodes)
