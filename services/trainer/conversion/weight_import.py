"""Begins a run, as its checkpoint after step 0, with weights of a Hugging Face folder, or an NxD or DCP checkpoint."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest, CheckpointPayload, ShardOrigin, shard_name
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Draft, commit, make_partial, open_artifact
from services.common.errors import ArtifactError, RecipeError, unreadable
from services.common.program.state import StateSlice
from services.common.program.transformer import parameter_shapes
from services.trainer.checkpoints.index import tabulate, write_index
from services.trainer.checkpoints.shards import pack_shard, write_packed
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.conversion.configuration import CONFIG, read_imported, require_same_model
from services.trainer.conversion.hugging_face import INDEX, WEIGHTS, HuggingFaceWeights, group_parameters
from services.trainer.conversion.nxd.checkpoint import BEGUN, MODEL, NxdWeights
from services.trainer.conversion.tokenizer import require_same_vocabulary
from services.trainer.job import Job
from services.trainer.runs.run import vocabulary_file

logger = logging.getLogger(__name__)

SHARD_ELEMENTS = 2**28
"""Approximate number of weights in one shard. With their moments they take 3 GiB, the memory that an import needs."""

ReadWeight = Callable[[str], Tensor]


def import_weights(job: Job, folder: Path) -> Path:
    """Write the checkpoint after step 0 with the folder's weights and configuration, and with moments of zero.

    Raises `RecipeError` if the folder has another model or vocabulary than the recipe, or if the recipe does not name
    its weights. Raises `ArtifactError` if the folder cannot be read, or if the run has already started.
    """
    recipe, address = job.recipe, job.checkpoint_address(0)
    shapes = parameter_shapes(recipe.model)
    with ExitStack() as opened:
        try:
            imported = read_imported(folder)
            corpus = open_artifact(job.corpus.path, CorpusManifest)
            require_same_vocabulary(folder, corpus, vocabulary_file(corpus))
            read = _open_weights(folder, job, shapes, opened)
            _require_named(folder, digest_weights(shapes, read), recipe.train.initial_weights)
        except OSError as error:
            raise unreadable(error.filename or folder, error) from error
        if checkpoint_steps(address.collection):
            raise ArtifactError(
                f"{address.collection}: the run has already started. `train` with its recipe continues it."
            )
        state = CheckpointPayload(
            step=0,
            tokens=0,
            skipped_steps=0,
            data_parallel_size=1,
            tensor_parallel_size=1,
            zero_stage=0,
            shards={},
            program_fingerprint=job.program_fingerprint,
            waivers=job.waivers,
            imported=imported,
        )
        partial = make_partial(address, job.writer)
        *shards, index = _write_files(partial, state.origin(job.run, rank=0), shapes, read)
    payload = state.with_shards(job.run, dict.fromkeys((entry.path for entry in shards), 0))
    draft = Draft(payload, job.corpus.links, (*shards, index))
    commit(address, CheckpointManifest, "trainer", recipe, draft, partial)
    return address.path


def digest_weights(shapes: Mapping[str, Iterable[int]], read: ReadWeight) -> str:
    """Return the SHA-256 over names, shapes and float32 values, whatever files and types store the weights."""
    digest = hashlib.sha256()
    for name in sorted(shapes):
        digest.update(f"{name} {list(shapes[name])}\n".encode())
        digest.update(read(name).contiguous().numpy().data)
    return digest.hexdigest()


def _open_weights(folder: Path, job: Job, shapes: Mapping[str, torch.Size], opened: ExitStack) -> ReadWeight:
    from services.trainer.conversion.dcp import METADATA, DcpWeights  # noqa: PLC0415 - takes a second

    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder. Pass one with --from, as a model's `save_pretrained` makes it.")
    model = job.recipe.model
    is_hugging_face = any((folder / name).exists() for name in (WEIGHTS, INDEX))
    is_nxd = not is_hugging_face and (folder / MODEL).is_dir()
    is_dcp = not is_hugging_face and ((folder / METADATA).exists() or any(folder.glob("*.distcp")))
    if not (is_hugging_face or is_nxd or is_dcp):
        within = sorted(path.parent.name for name in (BEGUN, METADATA) for path in folder.glob(f"*/{name}"))
        if within:
            raise ArtifactError(f"{folder}: contains checkpoints. Name one of them: {', '.join(within[-5:])}.")
    if (folder / CONFIG).exists() or not (is_nxd or is_dcp):
        require_same_model(folder, model)
    else:
        logger.warning(
            "%s: has no %s, so only names and shapes were compared. Heads, rotary positions and rms_norm_eps are the "
            "recipe's: they must be those that the run had.",
            folder,
            CONFIG,
        )
    if is_nxd:
        of_nxd = NxdWeights(folder, model)
        logger.info("weights are %s", "the optimizer's masters" if of_nxd.has_masters else "from `model`: no masters")
        return of_nxd.read
    if is_dcp:
        of_dcp = DcpWeights(folder, model)
        logger.info("weights have %s names", "torchtitan's" if of_dcp.is_torchtitans else "Hugging Face's")
        return of_dcp.read
    return HuggingFaceWeights(folder, shapes, opened).read


def _require_named(folder: Path, digest: str, named: str | None) -> None:
    if named == digest:
        return
    what = f"the recipe begins with {named}" if named else "the recipe names no initial weights"
    raise RecipeError(
        f"{folder}: has the weights {digest}, but {what}. They decide the run, so the recipe must name them:\n\n"
        f'  [train]\n  initial_weights = "{digest}"\n\nThen run the same command.'
    )


def _write_files(
    folder: Path, origin: ShardOrigin, shapes: Mapping[str, torch.Size], read: ReadWeight
) -> Iterator[FileEntry]:
    """Write the shards and their index, and yield the entries of the files."""
    written: list[tuple[StateSlice, int]] = []
    for number, names in enumerate(group_parameters(shapes, SHARD_ELEMENTS)):
        slices: dict[StateSlice, Tensor] = {}
        for name in names:
            weight = read(name)
            slices[StateSlice.whole("weight", name, weight.shape)] = weight
            for kind in ("exp_avg", "exp_avg_sq"):
                slices[StateSlice.whole(kind, name, weight.shape)] = torch.zeros_like(weight)
        written += [(piece, number) for piece in slices]
        yield write_packed(folder, shard_name(number), pack_shard(origin, slices))
    yield write_index(folder, origin, tabulate(written))
