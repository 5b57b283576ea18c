"""Ray clusters whose nodes are processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from services.common.launch.launcher import Launcher, choose_launcher


@contextmanager
def running_cluster(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Run a cluster of these nodes, which options of Ray's `Cluster.add_node` describe; the first one is the head."""
    ray, cluster_utils = pytest.importorskip("ray"), pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        # A Ray that this process started in place has left it where every node is at the loopback address.
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)
        patch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
        started = cluster_utils.Cluster(initialize_head=True, head_node_args=dict(nodes[0]))
        for node in nodes[1:]:
            started.add_node(**node)
        started.wait_for_nodes()
        yield started
        started.shutdown()


@contextmanager
def joining(cluster: Any) -> Iterator[Launcher]:
    """Give the launcher `ray`, whose commands join the cluster during the block."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield choose_launcher("ray")
        ray.shutdown()
