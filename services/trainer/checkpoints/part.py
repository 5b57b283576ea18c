"""Reads a worker's part of a checkpoint, and opens no other file than those that have it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from services.common.artifacts.checkpoint import INDEX_FILE, shard_name
from services.common.artifacts.files import locate
from services.common.errors import ArtifactError
from services.common.program.llama import parameter_shapes
from services.common.program.mesh import Mesh
from services.common.program.state import StateSlice
from services.trainer.checkpoints.index import read_index
from services.trainer.checkpoints.lookup import FoundCheckpoint
from services.trainer.checkpoints.safetensors_file import open_tensors
from services.trainer.checkpoints.shards import Place, Places, Shapes, SliceReader, read_header
from services.trainer.job import Job
from services.trainer.node_staging import verify_on_node

logger = logging.getLogger(__name__)


def read_part(job: Job, mesh: Mesh, checkpoint: FoundCheckpoint, held: Mapping[StateSlice, Tensor]) -> None:
    """Fill the slices that a worker holds with their elements, from files whose bytes are verified once on each node.

    A worker reads the shard of its own rank alone where that has exactly these slices, as it has in the layout that
    wrote it under ZeRO-1: it opens one file, whatever the number of workers. Otherwise it opens the index, and the
    shards in which that has elements of the slices.

    Raises `ArtifactError` for a damaged file, for values that training cannot produce, and unless the files have each
    element once.
    """
    shapes = parameter_shapes(job.recipe.model)
    if _read_own_shard(job, mesh, checkpoint, held, shapes):
        return
    verify_on_node(job, checkpoint, [INDEX_FILE])
    find_places = partial(read_index, checkpoint.path, checkpoint.origin_of(INDEX_FILE), shapes, checkpoint.ranks)
    make_reader = partial(SliceReader, checkpoint.path, checkpoint.origin_of, shapes)
    reader = make_reader(find_places(held))
    files = reader.files_of(held)
    logger.info("reading %d of %d shards of %s", len(files), len(checkpoint.ranks), checkpoint.path)
    verify_on_node(job, checkpoint, files)
    try:
        reader.read(held)
    except ArtifactError:
        make_reader(find_places(None)).require_each_element_once()  # says more, where this is the reason
        raise


def _read_own_shard(
    job: Job, mesh: Mesh, checkpoint: FoundCheckpoint, held: Mapping[StateSlice, Tensor], shapes: Shapes
) -> bool:
    """Fill the slices from the shard of the worker's rank, and return whether that has exactly these slices.

    Slices of kinds of which none is held do not count.
    """
    state, parallel, file = checkpoint.state, job.recipe.parallel, shard_name(mesh.rank)
    theirs = (state.data_parallel_size, state.tensor_parallel_size, state.zero_stage)
    ours = (mesh.data_parallel_size, mesh.tensor_parallel_size, parallel.zero_stage)
    if theirs != ours or checkpoint.ranks.get(file) != mesh.rank:
        return False
    verify_on_node(job, checkpoint, [file])
    kinds, places = {piece.kind for piece in held}, Places()
    with open_tensors(checkpoint.path, file, checkpoint.origin_of(file)) as tensors:
        for piece in read_header(locate(checkpoint.path, file), tensors, shapes):
            if piece.kind in kinds:
                places.setdefault((piece.kind, piece.name), []).append(Place(piece, file))
        if {place.piece for each in places.values() for place in each} != held.keys():
            return False
        logger.info("reading 1 of %d shards of %s, this worker's own", len(checkpoint.ranks), checkpoint.path)
        SliceReader(checkpoint.path, checkpoint.origin_of, shapes, places).read_from({file: tensors}, held)
    return True
