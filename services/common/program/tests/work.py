"""Functions that the tests run in worker processes, which import them from here."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict, get_args

import pytest
import torch
import torch.distributed as dist

from services.common.errors import WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.program.backends import torch_native
from services.common.program.backends.torch_native import TorchNative
from services.common.program.layers import gather_sequence, reduce_scatter_sequence
from services.common.program.mesh import AXES, Mesh, make_mesh
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.state import StateKind, StateSlice, fill, overlap
from services.common.program.step import Program
from services.common.recipe.schema import Device, Recipe
from services.common.testing.recipes import make_recipe
from services.common.testing.waiting import wait_until

WORKERS = 4


def run_on_workers(
    function: Callable[[Path, WorkerEnvironment], None], num_workers: int, folder: Path
) -> list[dict[str, Any]]:
    """Run a function of this module, or one like these, on workers, and return what each saved by `joined`."""
    run_workers(inline, function, folder, WorkerGroupSpec(num_workers, 1, num_workers, folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_workers)]


@contextmanager
def joined(folder: Path, environment: WorkerEnvironment, device: Device = "cpu") -> Iterator[dict[str, Any]]:
    """Join the group of all workers in the block, and save what it puts into the results, by name."""
    results: dict[str, Any] = {}
    with in_group(environment.rank, environment.world_size, environment.rendezvous, device):
        yield results
    torch.save(results, folder / f"{environment.rank}.pt")


@contextmanager
def in_group(rank: int, world_size: int, rendezvous: str, device: Device = "cpu") -> Iterator[None]:
    group = ProcessGroup.join(rank, world_size, rendezvous, TorchNative.world_collectives(device))
    yield
    group.barrier()
    group.leave()


def own_folder(folder: Path, environment: WorkerEnvironment) -> Path:
    own = folder / str(environment.rank)
    own.mkdir()
    return own


def part_of(rank: int) -> torch.Tensor:
    """Return a worker's tensor [8, 3]. Its magnitudes are so far apart that every order of additions has other bits."""
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)


def mesh_of(rank: int) -> Mesh:
    """Return a mesh with 2 workers along each axis: the tensor axis and the key-value axis are the same workers."""
    return Mesh(rank, data_parallel_size=2, tensor_parallel_size=2, key_value_copies=2)


def run_collectives(folder: Path, environment: WorkerEnvironment) -> None:
    """Write the results of every collective along each axis of `mesh_of`, with either reduction, and an exact sum over
    all workers with this worker's slice of it.
    """
    rank = environment.rank
    mesh, mine = mesh_of(rank), part_of(rank)
    with joined(folder, environment) as results:
        for reduction in ("exact", "fast"):
            backend = TorchNative(mesh, 1, reduction)
            for axis in AXES:
                results |= {
                    f"{reduction} sum {axis}": backend.all_reduce(mine, axis),
                    f"{reduction} max {axis}": backend.all_reduce(mine, axis, "max"),
                    f"{reduction} gather {axis}": backend.all_gather(mine, axis, dim=1),
                    f"{reduction} scatter {axis}": backend.reduce_scatter(mine, axis, dim=0),
                    f"{reduction} index {axis}": backend.index(axis),
                }
                assert torch.equal(mine, part_of(rank))
        backend = TorchNative(Mesh(rank, data_parallel_size=WORKERS), 1, "exact")
        results |= {"total": backend.all_reduce(mine, "data"), "slice": backend.reduce_scatter(mine, "data")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_native, "PIECE_ELEMENTS", mine.numel() // 2 + 1)  # the last piece is shorter
            results["in pieces"] = backend.all_reduce(mine, "data")


COLLECTIVE_LIMIT = timedelta(seconds=0.5)


def lose_a_worker(call: tuple[str, Path], environment: WorkerEnvironment) -> None:
    """Call a collective for the first time since the group formed, while the last worker hangs.

    Every other worker leaves a file, named by its rank, once the call has raised `WorkersLost`.
    """
    name, folder = call
    rank = environment.rank
    group = ProcessGroup.join(rank, environment.world_size, environment.rendezvous)
    backend = TorchNative(Mesh(rank, WORKERS), 1, "fast" if name.startswith("fast") else "exact")
    c10d = dist.distributed_c10d
    for each in c10d._world.pg_map:  # the groups along the mesh's axes too
        if isinstance(each, dist.ProcessGroup) and {device.type for device in each._device_types} & {"cpu", "cuda"}:
            c10d._set_pg_timeout(COLLECTIVE_LIMIT, each)
    if rank == WORKERS - 1:
        wait_until(lambda: len(list(folder.iterdir())) == WORKERS - 1)
        return
    collectives: dict[str, Callable[[], object]] = {
        "maximum": lambda: group.maximum(1),
        "started maximum": lambda: [group.start_maximum([1.0])()],
        "gather": lambda: group.gather({}),
        "exact sum": lambda: backend.all_reduce(torch.zeros(WORKERS), "data"),
        "fast sum": lambda: backend.reduce_scatter(torch.zeros(WORKERS), "data"),
    }
    with pytest.raises(WorkersLost):
        collectives[name]()
    (folder / str(rank)).touch()


SUMMED = (2, 64, 128)
SUMMING_WORKERS = 8


def activation_of(rank: int) -> torch.Tensor:
    """Return an activation in bfloat16, as a worker of a sharded model has it before the sum over the workers."""
    return torch.randn(SUMMED, generator=torch.Generator().manual_seed(rank)).bfloat16()


def sum_activations(folder: Path, environment: WorkerEnvironment) -> None:
    """Write this worker's slice of the sum of activations, and of a gathered activation's gradients, in each type."""
    rank = environment.rank
    with joined(folder, environment) as results:
        backend = TorchNative(Mesh(rank, 1, environment.world_size), 1, "fast")
        for dtype in (torch.float32, torch.bfloat16):
            results[f"forward {dtype}"] = reduce_scatter_sequence(activation_of(rank), backend, dtype)
            slice_BSD = torch.zeros_like(results[f"forward {dtype}"]).requires_grad_()
            gathered_BSD = gather_sequence(slice_BSD, backend, dtype)
            (results[f"backward {dtype}"],) = torch.autograd.grad(gathered_BSD, [slice_BSD], activation_of(rank))


PARALLEL_STEPS, MANY_STEPS = 2, 6
PARALLEL = {"model__num_attention_heads": "4", "model__num_key_value_heads": "2", "compile__enabled": "false"}
COPIES_APART = "tensor 4, 2 key-value heads, each on workers 2 apart"
MESHES = {"data 4": (4, 1), "data 2 x tensor 2": (2, 2), "tensor 4, 2 key-value heads": (1, 4)}
SPLIT_MESHES = {name: sizes for name, sizes in MESHES.items() if sizes[1] > 1}
MESHES_OF_TWO = {"data 2": (2, 1), "tensor 2": (1, 2)}
SIZES = (8, 4, 2)
OF_EIGHT = {"batch__global_batch_size": "16"}
"""Overrides that give each of 8 workers a micro-batch."""
EIGHT_STEPS = 4


def degrees(data_parallel_size: int, tensor_parallel_size: int) -> dict[str, str]:
    """Return the overrides of the small recipe for these parallel sizes."""
    return {
        "parallel__data_parallel_size": str(data_parallel_size),
        "parallel__tensor_parallel_size": str(tensor_parallel_size),
    }


SHARDED, SHARDED_SUMS, SHARDED_WEIGHTS = ", ZeRO-1", ", ZeRO-2", ", ZeRO-3"
RECOMPUTED, IN_DOCUMENTS = ", recomputed", ", z-loss and documents"
WITH_DOCUMENTS = {"train__z_loss": "0.01", "train__attention_mask": "block_causal"}
DOCUMENT_TOKENS = 7  # rows of 16
QWEN_3 = {"model__qk_norm": "true", "model__head_dim": "6", "model__tie_word_embeddings": "true"}
"""Overrides for QK norm, heads that are wider than a share of the hidden size, and a tied head."""
OF_QWEN_3 = ", Qwen3"
RECOMPUTING = {"train__activation_checkpointing": "selective"}
ROUNDED, FAST, LONG = ", bfloat16 weights", ", fast sums", ", many steps"
WITH_ROUNDED_WEIGHTS = {"train__dtype": "bfloat16", "train__param_dtype": "bfloat16"}


def tokens_of(recipe: Recipe, step: int) -> torch.Tensor:
    """Return the tokens of the micro-batches of a step's global batch."""
    batch = recipe.batch
    shape = (batch.num_micro_batches, batch.micro_batch_size, recipe.corpus.sequence_length + 1)
    return torch.randint(recipe.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))


def micro_batches_of(recipe: Recipe, step: int) -> list[MicroBatch]:
    """Return the micro-batches of a step's global batch, with documents of DOCUMENT_TOKENS where the recipe masks."""
    places_S = torch.arange(recipe.corpus.sequence_length, dtype=torch.int32)
    positions_BS = (places_S % DOCUMENT_TOKENS).repeat(recipe.batch.micro_batch_size, 1)
    has_documents = recipe.train.attention_mask == "block_causal"
    return [MicroBatch(tokens_BS, positions_BS if has_documents else None) for tokens_BS in tokens_of(recipe, step)]


class Trained(TypedDict):
    """Results of one worker after some steps of the small recipe."""

    numbers: dict[str, list[float]]
    """Losses and gradient norms of the steps, and the loss of each target of the last step's batch afterwards."""
    state: dict[str, torch.Tensor]
    """Slices of the state that the worker owns, by their keys."""
    num_held: int
    """Number of elements of the moments that the worker holds."""


def train_on(
    mesh: Mesh, folder: Path, num_steps: int = PARALLEL_STEPS, local_rank: int = 0, /, **overrides: str
) -> Trained:
    """Train for some steps. Where the optimizer is sharded, another program continues with the state halfway."""
    recipe = make_recipe(folder, **(PARALLEL | overrides))
    mesh = replace(mesh, takes_turns=recipe.parallel.zero_stage >= 2)
    backend = TorchNative(mesh, 1, recipe.train.reduction, recipe.parallel.device, local_rank)
    program = Program(recipe, backend)
    found = dict[str, list[float]](loss=[], gradient_norm=[])
    for step in range(num_steps):
        if recipe.parallel.zero_stage and step == num_steps // 2:
            saved, program = program.state.read(), Program(recipe, backend)
            with program.state.writing() as held:
                for piece, tensor in held.items():
                    tensor.copy_(saved[piece])
        batches = micro_batches_of(recipe, step)
        values = backend.read(program.train_step(step, [batches[n] for n in mesh.share(len(batches))])._asdict())
        for name, numbers in found.items():
            numbers.append(values[name])
    own = batches[mesh.index("data") :: mesh.data_parallel_size]
    evaluated = torch.cat([backend.to_host(program.evaluate(batch)) for batch in own])
    return {
        "numbers": {**found, "evaluation": evaluated.flatten().tolist()},
        "state": {piece.key: tensor.clone() for piece, tensor in program.state.start_snapshot()().items()},
        "num_held": sum(map(len, (*program.optimizer.exp_avg_S, *program.optimizer.exp_avg_sq_S))),
    }


def train_on_all(folder: Path, environment: WorkerEnvironment) -> None:
    """Run `train_on` on each of MESHES, and write the results.

    Meshes with a data axis also train with sharded optimizers and with bfloat16 weights. Those with a tensor axis also
    train with activation checkpointing and for MANY_STEPS. Those without a data axis also train with z-loss and
    documents. The first two workers then train on MESHES_OF_TWO.
    """
    rank, own = environment.rank, own_folder(folder, environment)
    meshes = {
        name: make_mesh(make_recipe(own, **PARALLEL, **degrees(*sizes)), rank, environment.world_size)
        for name, sizes in MESHES.items()
    }
    with joined(folder, environment) as results:
        results |= {name: train_on(mesh, own) for name, mesh in meshes.items()}
        results[COPIES_APART] = train_on(replace(meshes["tensor 4, 2 key-value heads"], are_copies_apart=True), own)
        for name, mesh in meshes.items():
            if mesh.data_parallel_size > 1:
                sharded = {"parallel__zero_stage": "1"}
                results[name + SHARDED] = train_on(mesh, own, **sharded)
                results[name + SHARDED_SUMS] = train_on(mesh, own, parallel__zero_stage="2")
                results[name + SHARDED_WEIGHTS] = train_on(mesh, own, parallel__zero_stage="3", **RECOMPUTING)
                results[name + ROUNDED] = train_on(mesh, own, **WITH_ROUNDED_WEIGHTS)
                results[name + SHARDED + ROUNDED] = train_on(mesh, own, **sharded, **WITH_ROUNDED_WEIGHTS)
            if mesh.tensor_parallel_size > 1:
                results[name + LONG] = train_on(mesh, own, MANY_STEPS)
                mode = "selective" if mesh.data_parallel_size > 1 else "full"
                results[name + RECOMPUTED] = train_on(mesh, own, train__activation_checkpointing=mode)
            if mesh.data_parallel_size == 1:
                results[name + IN_DOCUMENTS] = train_on(mesh, own, **WITH_DOCUMENTS)
        for name, stage in ((SHARDED, "1"), (SHARDED_WEIGHTS, "3")):
            results["data 4" + OF_QWEN_3 + name] = train_on(meshes["data 4"], own, parallel__zero_stage=stage, **QWEN_3)
        results["data 4" + ROUNDED + SHARDED_WEIGHTS] = train_on(
            meshes["data 4"], own, parallel__zero_stage="3", **WITH_ROUNDED_WEIGHTS
        )
        results["data 4" + FAST] = train_on(meshes["data 4"], own, train__reduction="fast")
    if rank < 2:
        with in_group(rank, 2, f"{environment.rendezvous}-two"):
            for name, sizes in MESHES_OF_TWO.items():
                mesh = make_mesh(make_recipe(own, **PARALLEL, **degrees(*sizes)), rank, 2)
                results[name + LONG] = train_on(mesh, own, MANY_STEPS)
        torch.save(results, folder / f"{rank}.pt")


def train_on_fewer_and_fewer(folder: Path, environment: WorkerEnvironment) -> None:
    """Run `train_on` with sharded optimizers on SIZES of data-parallel workers; surplus workers leave."""
    rank, own, results = environment.rank, own_folder(folder, environment), dict[str, Trained]()
    for size in SIZES:
        if rank < size:
            with in_group(rank, size, f"{environment.rendezvous}-{size}"):
                mesh = Mesh(rank, size)
                for name, stage in ((SHARDED, "1"), (SHARDED_SUMS, "2"), (SHARDED_WEIGHTS, "3")):
                    trained = train_on(mesh, own, EIGHT_STEPS, parallel__zero_stage=stage, **OF_EIGHT)
                    results[f"data {size}{name}"] = trained
    torch.save(results, folder / f"{rank}.pt")


def poison_a_shard(folder: Path, environment: WorkerEnvironment) -> None:
    """With ZeRO-3, make a weight of the last worker infinite, and write whether all weights were finite before and are
    now.
    """
    recipe = make_recipe(own_folder(folder, environment), **PARALLEL, parallel__zero_stage="3")
    with joined(folder, environment) as results:
        mesh = Mesh(environment.rank, environment.world_size, takes_turns=True)
        program = Program(recipe, TorchNative(mesh, 1, recipe.train.reduction))
        results["before"] = bool(program.state.is_finite())
        if environment.rank == environment.world_size - 1:
            program.optimizer.state()["weight"][0][0] = float("inf")
        results["after"] = bool(program.state.is_finite())


def assemble(workers: Sequence[Trained], shapes: Mapping[str, Sequence[int]]) -> dict[StateSlice, torch.Tensor]:
    """Return the full tensors of the state from the slices that the workers own, which have each element once."""
    slices = {StateSlice.parse(key): tensor for each in workers for key, tensor in each["state"].items()}
    assert sum(map(len, slices)) == 3 * sum(map(math.prod, shapes.values()))
    found = {
        StateSlice.whole(kind, parameter, shape): torch.empty(tuple(shape))
        for kind in get_args(StateKind)
        for parameter, shape in shapes.items()
    }
    for target, tensor in found.items():
        fill(target, tensor, {piece: held.clone for piece, held in slices.items() if overlap(piece, target)})
    return found


def _of_ids(number: str) -> dict[str, str]:
    return {"tokenizer__train__vocab_size": number, "model__vocab_size": number}


ODD_VOCABULARIES: dict[str, dict[str, str]] = {
    "301 ids, z-loss and documents": {**_of_ids("301"), **WITH_DOCUMENTS},
    "301 ids, tied": {**_of_ids("301"), "model__tie_word_embeddings": "true"},
    "301 ids, Qwen3": {**_of_ids("301"), **QWEN_3},
    "a shard of padding alone": {"model__padded_vocab_size": "901"},
}
"""Overrides by which shards of the vocabulary have padding, where 2 or 4 workers share a model. 300 ids fill the first
of 4 shards of 226 rows, and a third of the second.
"""


def train_odd_vocabularies(folder: Path, environment: WorkerEnvironment) -> None:
    """Run `train_on` with ODD_VOCABULARIES on SPLIT_MESHES, with sharded optimizers, and write the results."""
    rank, own = environment.rank, own_folder(folder, environment)
    with joined(folder, environment) as results:
        for name, sizes in SPLIT_MESHES.items():
            mesh = make_mesh(make_recipe(own, **PARALLEL, **degrees(*sizes)), rank, environment.world_size)
            for vocabulary, overrides in ODD_VOCABULARIES.items():
                trained = train_on(mesh, own, MANY_STEPS, parallel__zero_stage="1", **overrides)
                results[f"{vocabulary}, {name}"] = trained


HEALTH_STEPS = 2
_SMALL = {"compile__enabled": "false", "optimizer__max_grad_norm": "0.5", "optimizer__weight_decay": "0.1"}
HEALTH_MODELS = {
    "plain": {**_SMALL, "model__num_key_value_heads": "2"},
    "one key-value head, 301 ids": {**_SMALL, **_of_ids("301"), "model__num_key_value_heads": "1"},
    "bfloat16": {**_SMALL, "model__num_key_value_heads": "2", **WITH_ROUNDED_WEIGHTS},
}
HEALTH_LAYOUTS = {
    "data 2": {"parallel__data_parallel_size": "2", "parallel__zero_stage": "0"},
    "data 2, ZeRO-1": {"parallel__data_parallel_size": "2", "parallel__zero_stage": "1"},
    "tensor 2": {"parallel__tensor_parallel_size": "2"},
}
Measured = tuple[dict[str, Any], int]
"""The health of a model by the names of its numbers, and a digest of the weights after one more step."""


def measure_health_on(mesh: Mesh, folder: Path, is_measured: bool = True, /, **overrides: str) -> Measured:
    """Train HEALTH_STEPS steps, measure unless told otherwise, and train one step more."""
    recipe = make_recipe(folder, **overrides)
    program, health = Program(recipe, TorchNative(mesh, 1, recipe.train.reduction)), dict[str, Any]()
    for step in range(HEALTH_STEPS + 1):
        batches = micro_batches_of(recipe, step)
        own = [batches[n] for n in mesh.share(len(batches))]
        program.train_step(step, own)
        if is_measured and step == HEALTH_STEPS - 1:
            health = program.measure_health(step, 0, True, own)._asdict()
    weights = (each.flatten().view(torch.uint8) for bucket in program.buckets for each in bucket.weights)
    return health, zlib.crc32(torch.cat(list(weights)).numpy().data)


def measure_health_on_all(folder: Path, environment: WorkerEnvironment) -> None:
    """Run `measure_health_on` with each of HEALTH_MODELS on each of HEALTH_LAYOUTS, and write the results."""
    own = own_folder(folder, environment)
    with joined(folder, environment) as results:
        for model, overrides in HEALTH_MODELS.items():
            for layout, changes in HEALTH_LAYOUTS.items():
                mesh = make_mesh(make_recipe(own, **overrides, **changes), environment.rank, environment.world_size)
                results[f"{model}, {layout}"] = measure_health_on(mesh, own, **overrides, **changes)
