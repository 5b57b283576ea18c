"""Work of two workers: the same weights and inputs through NxD's layers and through ours."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    gather_sequence,
    reduce_scatter_sequence,
)
from services.common.program.loss import next_token_loss
from services.common.program.mesh import Mesh
from services.common.program.tests import neuron_stand_ins
from services.common.program.tests.work import joined

WORKERS = 2
BATCH, LENGTH, HIDDEN, INNER, VOCABULARY = 2, 8, 16, 32, 64
Results = dict[str, Tensor]
SEED = 7


def compare(folder: Path, environment: WorkerEnvironment) -> None:
    """Write this worker's results of both to the folder, by name."""
    rank = environment.rank
    os.environ["NXD_CPU_MODE"] = "1"  # NxD's own switch: its collectives are gloo's
    neuron_stand_ins.install()
    with joined(folder, environment) as results:
        nxd = {name: importlib.import_module(f"neuronx_distributed.parallel_layers.{name}") for name in _MODULES}
        nxd["parallel_state"].initialize_model_parallel(tensor_model_parallel_size=WORKERS)
        backend = TorchNative(Mesh(rank, 1, WORKERS), 1, "fast")
        results |= {"ours": _run_ours(backend), "theirs": _run_theirs(nxd, rank)}


_MODULES = ("parallel_state", "layers", "loss_functions", "mappings")


def _draw() -> Results:
    """Draw full weights and inputs, the same on every worker."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = {
        "embedding": (VOCABULARY, HIDDEN),
        "column": (INNER, HIDDEN),
        "row": (HIDDEN, INNER),
        "head": (VOCABULARY, HIDDEN),
    }
    drawn = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    for name in ("tokens", "targets"):
        drawn[name] = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return drawn


def _run_ours(backend: TorchNative) -> Results:
    drawn, mesh = _draw(), backend.mesh
    embedding = VocabularyParallelEmbedding(VOCABULARY, HIDDEN, backend)
    column, row = ColumnParallelLinear(HIDDEN, INNER, mesh), RowParallelLinear(INNER, HIDDEN, mesh)
    head = ColumnParallelLinear(HIDDEN, VOCABULARY, mesh)
    layers: dict[str, Any] = {"embedding": embedding, "column": column, "row": row, "head": head}
    for name, layer in layers.items():
        ranges = layer.sharding.box(layer.weight.shape)
        layer.weight = nn.Parameter(drawn[name][tuple(slice(*each) for each in ranges)].clone())

    embedded_BSD = reduce_scatter_sequence(embedding(drawn["tokens"]), backend, torch.float32)
    inner_BSF = F.silu(column(gather_sequence(embedded_BSD, backend, torch.float32)))
    hidden_BSD = reduce_scatter_sequence(row(inner_BSF), backend, torch.float32)
    loss = next_token_loss(hidden_BSD, head.weight, drawn["targets"], BATCH * LENGTH, backend)
    loss.backward()
    gradients = {f"gradient of {name}": _gradient(layer) for name, layer in layers.items()}
    activations = {"embedded": embedded_BSD, "inner": inner_BSF, "hidden": hidden_BSD}
    return {name: each.detach() for name, each in (activations | {"loss": loss} | gradients).items()}


def _run_theirs(nxd: dict[str, Any], rank: int) -> Results:
    """Run NxD's layers, whose activations are [S, B, D] where the sequence is sharded."""
    drawn, layers, mappings = _draw(), nxd["layers"], nxd["mappings"]
    by_sequence = {"sequence_parallel_enabled": True, "sequence_dimension": 0}
    column = layers.ColumnParallelLinear(HIDDEN, INNER, bias=False, gather_output=False, **by_sequence)
    row = layers.RowParallelLinear(INNER, HIDDEN, bias=False, input_is_parallel=True, **by_sequence)
    head = layers.ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, gather_output=False, **by_sequence)
    embedding = layers.ParallelEmbedding(VOCABULARY, HIDDEN)
    modules = {"embedding": embedding, "column": column, "row": row, "head": head}
    for name, layer in modules.items():
        part = drawn[name].chunk(WORKERS, dim=1 if name == "row" else 0)[rank]
        assert layer.weight.shape == part.shape
        with torch.no_grad():
            layer.weight.copy_(part)

    whole_SBD = embedding(drawn["tokens"]).transpose(0, 1).contiguous()
    embedded_SBD = mappings.scatter_to_sequence_parallel_region(whole_SBD, 0)
    inner_SBF = F.silu(column(embedded_SBD))
    hidden_SBD = row(inner_SBF)
    targets_SB = drawn["targets"].transpose(0, 1).contiguous()
    losses_SB = nxd["loss_functions"].parallel_cross_entropy(head(hidden_SBD), targets_SB)
    loss = losses_SB.mean()
    loss.backward()
    gradients = {f"gradient of {name}": _gradient(layer) for name, layer in modules.items()}
    activations = {"embedded": embedded_SBD, "inner": inner_SBF, "hidden": hidden_SBD}
    found = {name: each.detach().transpose(0, 1) for name, each in activations.items()}
    return found | {"loss": loss.detach()} | gradients


def _gradient(layer: nn.Module) -> Tensor:
    gradient = layer.get_parameter("weight").grad
    assert gradient is not None
    return gradient
