"""A node of the cluster is lost while the stage runs there, and the corpus is that of an undisturbed run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.testing.ray_clusters import joining, running_cluster
from services.tokenizer.tests.builders import make_text, published, run, write_documents, write_recipe

pytest.importorskip("ray")

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of the tokenizer. Ray takes this process to be on the first one."""
    node = {"num_cpus": 2, "resources": {"stage_tokenizer": 1}}
    with running_cluster([node, node]) as started, joining(started):
        yield started


class Watch(threading.Thread):
    """Removes a node when some partitions are encoded, and notes whether a finished one is ever encoded again."""

    def __init__(self, root: Path, cluster: Any) -> None:
        super().__init__()
        self._root, self._cluster = root, cluster
        self.is_over = threading.Event()
        self.finished_before = 0
        self.encoded_again: set[str] = set()

    def run(self) -> None:
        inodes: dict[str, int] = {}
        while not self.is_over.wait(0.02):
            for path in self._root.glob("corpus/*/*.scratch/*/0*/*[0-9].json"):
                try:
                    inode = path.stat().st_ino
                except FileNotFoundError:  # the corpus was published, and scratch is removed
                    continue
                if inodes.setdefault(path.name, inode) != inode:
                    self.encoded_again.add(path.name)
            if len(inodes) >= 6 and not self.finished_before:
                self.finished_before = len(inodes)
                self._cluster.remove_node(self._cluster.worker_nodes.copy().pop(), allow_graceful=False)


def test_a_node_that_is_lost_costs_its_unfinished_partitions_alone(tmp_path: Path, cluster: Any) -> None:
    text = write_documents(tmp_path / "text", [make_text(300_000, seed=seed) for seed in range(40)])
    recipe = write_recipe(
        tmp_path, text, corpus__split_bytes=300_000, corpus__rows_per_shard=5_000, tokenizer__num_workers=4
    )
    watch = Watch(tmp_path / "fsx", cluster)
    watch.start()
    try:
        assert run(recipe, tmp_path / "fsx", "--launch=ray") == 0
    finally:
        watch.is_over.set()
        watch.join()

    assert 6 <= watch.finished_before < 40
    assert not watch.encoded_again
    assert run(recipe, tmp_path / "alone", "--tokenizer.num_workers=1") == 0
    made = [published(tmp_path / name).manifest for name in ("fsx", "alone")]
    assert made[0].content_digest == made[1].content_digest
