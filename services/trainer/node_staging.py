"""What a node does once for all of a command's processes on it: verify what they read, copy the compile cache.

The processes meet in a node-local folder named after the command's attempt; the first one to lock it does
the work and leaves a stamp. The next command verifies again: a stamp never outlives its attempt, whose folder goes
with the last process that uses it.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import GRAPHS
from services.common.artifacts.files import list_files, locate, verify_files
from services.common.artifacts.store import Artifact
from services.common.errors import WorkersLost
from services.common.process.private_folder import private_base, private_folder
from services.trainer.job import Job

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
"""Ends the names of files `lock` and `MODULE_....lock`."""


def node_folder(job: Job) -> Path:
    return private_base() / job.attempt


def compile_cache_folder(job: Job) -> Path:
    """Node-local: caches write into the directory that they read, and a published one must not change."""
    return node_folder(job) / "compile_cache"


@contextmanager
def using_node(job: Job) -> Iterator[None]:
    """Keep the node's folder while the block takes. It stays for workers that are about to be started again."""
    with private_folder(job.attempt, keep_after=(WorkersLost,)):
        yield


def prepare_node(job: Job) -> None:
    """Verify the corpus and copy the verified compile cache, unless another process of this command has done it.

    Raises `ArtifactError` that names the damaged files.
    """
    with _doing_once(job, "prepared") as is_to_do:
        if not is_to_do:
            return
        verify_files(job.corpus.path, job.corpus.manifest)
        logger.info("verified the corpus %s", job.corpus.path)
        cache = compile_cache_folder(job)
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        if job.cache:
            verify_files(job.cache.path, job.cache.manifest)
            for entry in job.cache.manifest.files:  # what is listed, and so verified; not what else lies there
                folder_of_graphs, _, below = entry.path.partition("/")
                if folder_of_graphs == GRAPHS and below:
                    target = cache / below  # no part of a listed path is `..`
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(locate(job.cache.path, entry.path), target)


def verify_on_node(job: Job, checkpoint: Artifact[CheckpointManifest], files: Iterable[str]) -> None:
    """Check the bytes of the files that a worker is about to read. Each is checked by one of this command's processes
    on the node, and by one of them again at every start after a loss, which may come weeks later.

    Raises `ArtifactError` that names one that is damaged.
    """
    manifest = checkpoint.manifest
    for file in files:
        with _doing_once(
            job, f"verified-{job.start_number}-{manifest.id}-{manifest.content_digest}-{file}"
        ) as is_to_do:
            if is_to_do:
                verify_files(checkpoint.path, manifest, paths=[file])
                logger.info("verified %s of %s", file, checkpoint.path)


@contextmanager
def _doing_once(job: Job, what: str) -> Iterator[bool]:
    """Whether `what` is still to be done by this node. It counts as done when the block ends without an error; others
    wait meanwhile.
    """
    folder = node_folder(job)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = folder / what
        yield not stamp.exists()
        stamp.touch()


def new_cache_files(job: Job) -> int:
    """Files in the node's copy of the compile cache that the published one does not have.

    The locks of libneuronxla are none: it makes them where it only reads.
    """
    published = {entry.path for entry in job.cache.manifest.files} if job.cache else set()
    found = [path for path in list_files(compile_cache_folder(job)) if not path.endswith(LOCK_NAME)]
    return sum(f"{GRAPHS}/{path}" not in published for path in found)
