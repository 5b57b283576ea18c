"""Does once on each node what all processes of a command need: copies the compile cache, verifies checkpoint files.

The processes share a node-local folder named after the command's attempt; the first to lock it does the work and leaves
a stamp. So a file is read once on each node that needs it, and again by the next command.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.artifacts.compile_cache import GRAPHS
from services.common.artifacts.files import copy_files, find_damages, list_files, require_undamaged
from services.common.artifacts.manifest import FileEntry
from services.trainer.checkpoints.lookup import FoundCheckpoint
from services.trainer.job import Job

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
"""Ending of the names of lock files in a compile cache: `lock` and `MODULE_....lock`."""


def node_folder(job: Job) -> Path:
    """Return the folder of the command on this node, which the command or the node's agent removes at its end."""
    return Path(tempfile.gettempdir(), f"millrace-{job.attempt}")


def compile_cache_folder(job: Job) -> Path:
    """Return the node-local copy: compilers write into the cache that they read; a published one must not change."""
    return node_folder(job) / "compile_cache"


@contextmanager
def using_node(job: Job) -> Iterator[None]:
    """Keep the node's folder during the block, and remove it afterwards."""
    try:
        yield
    finally:
        shutil.rmtree(node_folder(job), ignore_errors=True)


def prepare_node(job: Job) -> None:
    """Copy the compile cache to this node unless another process of this command has done so.

    Its files are verified meanwhile. Raises `ArtifactError`, which names the damaged ones.
    """
    with _doing_once(job, "prepared") as is_to_do:
        if not is_to_do:
            return
        cache = compile_cache_folder(job)
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        if job.cache:
            targets = {
                entry.path: cache / below  # no part of a listed path is `..`
                for entry in job.cache.manifest.files
                if (below := entry.path.removeprefix(f"{GRAPHS}/")) != entry.path
            }
            for folder in {target.parent for target in targets.values()}:
                folder.mkdir(parents=True, exist_ok=True)
            copy_files(job.cache.path, job.cache.manifest, targets)


def verify_on_node(job: Job, checkpoint: FoundCheckpoint, entries: Iterable[FileEntry]) -> None:
    """Verify the bytes of the files that a worker is about to read, once on each node and start of the workers.

    Raises `ArtifactError`, which names a damaged file.
    """
    state = f"{job.start_number}-{checkpoint.header.id}-{checkpoint.content_digest}"
    for entry in entries:
        with _doing_once(job, f"verified-{state}-{entry.path}") as is_to_do:
            if is_to_do:
                require_undamaged(checkpoint.path, 1, find_damages(checkpoint.path, [entry], "full"))
                logger.info("verified %s of %s", entry.path, checkpoint.path)


@contextmanager
def _doing_once(job: Job, what: str) -> Iterator[bool]:
    """Yield whether this node still has to do `what`, which counts as done when the block ends without an error."""
    folder = node_folder(job)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / what
        yield not stamp.exists()
        stamp.touch()


def new_cache_files(job: Job) -> int:
    """Count the files in the node's copy of the compile cache that the published cache does not have.

    Lock files do not count: libneuronxla makes them even where it only reads.
    """
    published = {entry.path for entry in job.cache.manifest.files} if job.cache else set()
    found = [path for path in list_files(compile_cache_folder(job)) if not path.endswith(LOCK_NAME)]
    return sum(f"{GRAPHS}/{path}" not in published for path in found)
