"""A trainer's world in memory whose nodes come from a node group of moto's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from k8s.objects.names import node_pool_annotation
from tests.k8s.builders import Clock
from tests.k8s.cloud import POOL
from tests.k8s.rendered import Thing
from tests.k8s.world import World


@pytest.fixture
def make_world(eks_cluster: Thing, clock: Clock, account: None) -> Callable[[], World]:
    """Makes worlds without nodes, whose trainer has a node pool."""
    eks_cluster["metadata"]["annotations"][node_pool_annotation("trainer")] = POOL
    began = clock.now

    def make() -> World:
        clock.now = began
        return World(eks_cluster, clock, nodes=0, pool=POOL)

    return make
