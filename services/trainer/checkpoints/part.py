"""Reads a worker's part of a checkpoint, and opens no other file than those that have it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from services.common.artifacts.checkpoint import INDEX_FILE
from services.common.artifacts.files import locate
from services.common.errors import ArtifactError
from services.common.program.llama import parameter_shapes
from services.common.program.state import StateSlice
from services.trainer.checkpoints.index import read_index
from services.trainer.checkpoints.lookup import FoundCheckpoint, OwnShard
from services.trainer.checkpoints.safetensors_file import open_tensors
from services.trainer.checkpoints.shards import Place, Places, Shapes, SliceReader, read_header
from services.trainer.job import Job
from services.trainer.node_staging import verify_on_node

logger = logging.getLogger(__name__)


def read_part(
    job: Job, checkpoint: FoundCheckpoint, own_shard: OwnShard | None, held: Mapping[StateSlice, Tensor]
) -> None:
    """Fill the slices that a worker holds with their elements, from files whose bytes are verified once on each node.

    A worker reads the shard of its own rank alone where that has exactly these slices, as it has in the layout that
    wrote it under ZeRO-1: it opens one file, whatever the number of workers. Otherwise it opens the manifest, the
    index, and the shards in which that has elements of the slices. See `describe_checkpoint` for `own_shard`.

    Raises `ArtifactError` for a damaged file, for values that training cannot produce, and unless the files have each
    element once.
    """
    shapes = parameter_shapes(job.recipe.model)
    if own_shard and _read_own_shard(job, checkpoint, own_shard, held, shapes):
        return
    manifest = checkpoint.read_manifest()
    entries, origins = {entry.path: entry for entry in manifest.files}, manifest.checkpoint.shards
    verify_on_node(job, checkpoint, [entries[INDEX_FILE]])
    find_places = partial(read_index, checkpoint.path, checkpoint.origin_of(rank=0), shapes, origins)
    make_reader = partial(SliceReader, checkpoint.path, origins.__getitem__, shapes)
    reader = make_reader(find_places(held))
    files = reader.files_of(held)
    logger.info("reading %d of %d shards of %s", len(files), len(origins), checkpoint.path)
    verify_on_node(job, checkpoint, [entries[file] for file in files])
    try:
        reader.read(held)
    except ArtifactError:
        make_reader(find_places(None)).require_each_element_once()  # says more, where this is the reason
        raise


def _read_own_shard(
    job: Job, checkpoint: FoundCheckpoint, own_shard: OwnShard, held: Mapping[StateSlice, Tensor], shapes: Shapes
) -> bool:
    """Fill the slices from the shard of the worker's rank, and return whether that has exactly these slices.

    Slices of kinds of which none is held do not count.
    """
    file, origin = own_shard.entry.path, checkpoint.origin_of(own_shard.rank)
    verify_on_node(job, checkpoint, [own_shard.entry])
    kinds, places = {piece.kind for piece in held}, Places()
    with open_tensors(checkpoint.path, file, origin) as tensors:
        for piece in read_header(locate(checkpoint.path, file), tensors, shapes):
            if piece.kind in kinds:
                places.setdefault((piece.kind, piece.name), []).append(Place(piece, file))
        if {place.piece for each in places.values() for place in each} != held.keys():
            return False
        logger.info("reading 1 of %d shards of %s, this worker's own", checkpoint.state.num_workers, checkpoint.path)
        SliceReader(checkpoint.path, {file: origin}.__getitem__, shapes, places).read_from({file: tensors}, held)
    return True
