"""A single process traces the graphs of all workers of a Trainium run: all ranks share them, and no more come later."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import DeviceError
from services.common.program.backends.neuron_xla import MAX_COLLECTIVE_BYTES
from services.common.program.fingerprint import program_facts
from services.common.program.mesh import make_mesh
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import load_with, make_recipe, write_recipe
from services.compiler.__main__ import main
from services.compiler.modules import DONE, FLAGS, GRAPH, NEFF
from services.compiler.tests import compiled_graph, neuronx_cc
from services.compiler.trace import PHASES, run_phases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed: `make test-torch29` has it"
)

SPLIT = {
    "model__num_attention_heads": "8",
    "model__num_key_value_heads": "2",
    "model__vocab_size": "512",
    "tokenizer__train__vocab_size": "512",
    "parallel__device": "xla",
    "parallel__data_parallel_size": "8",
    "parallel__tensor_parallel_size": "8",
    "parallel__zero_stage": "1",
    "batch__global_batch_size": "64",
    "train__reduction": "fast",
    "train__dtype": "bfloat16",
    "train__param_dtype": "bfloat16",
}
TRN1_RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*-trn1.toml"))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")


COLLECTIVE = re.compile(r" = (\S+) (?:(all-gather)|reduce-scatter)\((.*?)\), (?:channel|replica)")
SHAPE = re.compile(r"(bf16|f32|s32)\[([\d,]*)\]")
BYTES = {"bf16": 2, "f32": 4, "s32": 4}


def largest_collective(graph: bytes) -> int:
    """Return the bytes of the largest output of an all-gather, or input of a reduce-scatter, in the graph."""
    import torch_xla.core.xla_builder as xb  # noqa: PLC0415

    text = xb.get_computation_hlo(xb.computation_from_module_proto("graph", graph))
    found = [made if is_gather else taken for made, is_gather, taken in COLLECTIVE.findall(text)]
    assert len(found) == len(re.findall(r" (?:all-gather|reduce-scatter)\(", text))
    return max((_bytes_of(shapes) for shapes in found), default=0)


def _bytes_of(shapes: str) -> int:
    return sum(
        BYTES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in SHAPE.findall(shapes)
    )


@pytest.fixture
def split(tmp_path: Path) -> Recipe:
    """Recipe with 64 workers: 8 models of 8 workers, where 4 workers share a key-value head."""
    return make_recipe(tmp_path, **SPLIT)


def trace_as(recipe: Recipe, rank: int) -> tuple[dict[str, list[str]], dict[str, bytes]]:
    """Trace as one rank; returns the graphs' keys by phase, and the graphs by key."""
    from services.compiler.neuron_trace import TracedXla  # noqa: PLC0415

    backend = TracedXla(make_mesh(recipe, rank, recipe.parallel.num_workers), threads=1)
    met: dict[str, list[str]] = {}

    def close(phase: str) -> None:
        met[phase] = backend.met[sum(map(len, met.values())) :]

    run_phases(recipe, backend, close)
    return met, backend.graphs


def test_every_rank_traces_the_same_graphs(split: Recipe) -> None:
    met, graphs = trace_as(split, rank=0)
    digests = {key: hashlib.sha256(graph).hexdigest() for key, graph in graphs.items()}
    for rank in (1, 7, 8, 63):
        theirs, their_graphs = trace_as(split, rank)
        assert theirs == met
        assert {key: hashlib.sha256(graph).hexdigest() for key, graph in their_graphs.items()} == digests


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"train__activation_checkpointing": "full"},
        {"train__attention_mask": "block_causal"},
        {"parallel__zero_stage": "2"},
    ],
    ids=["plain", "recomputed", "in documents", "ZeRO-2"],
)
def test_a_run_has_one_graph_for_micro_batches_and_one_for_updates(tmp_path: Path, changed: dict[str, str]) -> None:
    """Graphs hold no step number and no learning rate; evaluation, finiteness check and loading have one graph each.

    A health measurement has one for micro-batches and one for norms.
    """
    met, graphs = trace_as(make_recipe(tmp_path, **{**SPLIT, **changed}), rank=0)

    micro_batch, again, update = met[PHASES[0]]
    assert micro_batch == again != update
    for step in ("second step", "third step", "step after resume"):
        assert met[step] == [micro_batch, micro_batch, update]
    check, load = met["save and resume"]
    (evaluation,) = met["evaluation"]
    activations, norms = met["health measurement"]
    assert list(graphs) == [micro_batch, update, check, load, evaluation, activations, norms]


@pytest.mark.timeout(900)  # a process of its own compiles three graphs: 10 s of a core
@pytest.mark.parametrize("tensor_parallel_size", [1, 8])
def test_the_compiler_keeps_what_is_to_be_computed_again(tmp_path: Path, tensor_parallel_size: int) -> None:
    """Fences keep XLA's elimination of common subexpressions from undoing activation checkpointing."""
    counts = compiled_graph.count_operations(tmp_path, tensor_parallel_size)
    layers, products, norms = compiled_graph.LAYERS, 9 - 1, 2  # the backward pass does not use a layer's last product
    assert counts["full"]["dot"] == counts["none"]["dot"] + layers * products
    assert counts["selective"]["dot"] == counts["none"]["dot"]
    for mode in ("full", "selective"):
        assert counts[mode]["rsqrt"] == counts["none"]["rsqrt"] + layers * norms, mode


@pytest.mark.parametrize("path", TRN1_RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_traced_at_its_real_size(path: Path) -> None:
    """The trace has all layers and workers, takes no memory for weights, and no collective exceeds the limit."""
    met, graphs = trace_as(load_with(path), rank=0)

    assert len(graphs) == 7
    assert met["step after resume"] == met["first step"]
    assert max(map(len, graphs.values())) > 500_000
    for graph in graphs.values():
        assert largest_collective(graph) <= MAX_COLLECTIVE_BYTES


@pytest.mark.parametrize(
    "changed",
    [{"parallel__data_parallel_size": "4"}, {"parallel__zero_stage": "2"}, {"batch__global_batch_size": "32"}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_cache_is_for_one_update(tmp_path: Path, split: Recipe, changed: dict[str, str]) -> None:
    """An update is one graph, which lists its ranks. The native backend's caches do not depend on these fields."""
    assert program_facts(make_recipe(tmp_path, **{**SPLIT, **changed})) != program_facts(split)


def test_the_stage_publishes_a_split_model_s_graphs_and_has_nothing_to_do_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Child processes trace, a stand-in for neuronx-cc compiles, and a second trace verifies."""
    compiler = neuronx_cc.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{compiler}{os.pathsep}{os.environ['PATH']}")
    recipe = write_recipe(tmp_path)
    overrides = {**SPLIT, "compile__trace_on": "cpu", "compile__task_cpus": "1", "compile__task_memory_gib": "0.1"}
    options = [f"--{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    command = ["--recipe", str(recipe), "--root", str(tmp_path / "fsx"), "--launch", "inline", *options]

    every_graph: dict[str, Any] = {"MODULE": "broken"}
    neuronx_cc.behave(compiler, **every_graph)
    with pytest.raises(DeviceError, match="7 of 7 graphs"):
        main(command)
    neuronx_cc.behave(compiler)
    assert main(command) == 0
    assert "7 graphs" in capsys.readouterr().out
    (cache,) = (tmp_path / "fsx" / "compile_cache" / "xla").glob("*/graphs/neuronxcc-*")
    assert {path.name for path in cache.glob("MODULE_*/*")} == {GRAPH, FLAGS, NEFF, DONE}

    calls = len(neuronx_cc.read_calls(compiler))
    assert main(command) == 0
    assert "already published" in capsys.readouterr().out
    assert len(neuronx_cc.read_calls(compiler)) == calls
