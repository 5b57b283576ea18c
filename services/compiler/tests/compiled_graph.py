"""Compiles a micro-batch's graph with XLA's compiler for CPUs, and counts its operations.

torch_xla shows graphs before compilation only (`_get_xla_tensors_hlo`). XLA writes compiled graphs to the folder that
XLA_FLAGS names, and reads that variable once, so a child process compiles them (`python -m` of this module). The files
that end in `cpu_after_optimizations.txt` hold the executed graphs. With `--xla_dump_hlo_pass_re=.*` XLA writes a file
after every pass, which shows the pass that removed a product.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

from torch import Tensor

from services.common.program.mesh import make_mesh
from services.common.program.micro_batch import make_synthetic_micro_batch
from services.common.program.step import Program
from services.common.recipe.training import ActivationCheckpointing
from services.common.testing.commands import run_python
from services.common.testing.recipes import make_recipe
from services.compiler.neuron_trace import TracedXla

LAYERS = 2
MODES = get_args(ActivationCheckpointing)
SMALL = {
    "model__num_hidden_layers": f"{LAYERS}",
    "model__num_attention_heads": "8",
    "model__num_key_value_heads": "8",
    "model__vocab_size": "512",
    "tokenizer__train__vocab_size": "512",
    "parallel__device": "xla",
    "train__reduction": "fast",
}
OPERATION = re.compile(r"^ *(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", re.MULTILINE)


def count_operations(folder: Path, tensor_parallel_size: int) -> dict[str, Counter[str]]:
    """Count the operations of a micro-batch's compiled graph, by `train.activation_checkpointing`."""
    # LLVM, whose optimization is left out, runs after all passes over graphs.
    flags = f"--xla_dump_to={folder / 'graphs'} --xla_dump_hlo_as_text --xla_backend_optimization_level=0"
    done = run_python(["-m", __name__, str(folder), f"{tensor_parallel_size}"], XLA_FLAGS=flags, PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stdout
    compiled = sorted((folder / "graphs").glob("module_*SyncTensorsGraph*cpu_after_optimizations.txt"))
    texts = [path.read_text(encoding="utf-8") for path in compiled]
    return {mode: Counter(OPERATION.findall(text)) for mode, text in zip(MODES, texts, strict=True)}


class _CompiledXla(TracedXla):
    """Backend that compiles the first graph with torch_xla, and executes none."""

    def end_graph(self) -> None:
        pending: list[Tensor] = self._pending_tensors()
        if pending and not self.met:
            self._xla._XLAC._xla_warm_up_cache(pending, [])
        super().end_graph()


def _compile(folder: Path, tensor_parallel_size: str) -> None:
    """Compile rank 0's micro-batch graph for every mode of activation checkpointing, in the order of MODES."""
    for mode in MODES:
        changed = {"parallel__tensor_parallel_size": tensor_parallel_size, "train__activation_checkpointing": mode}
        recipe = make_recipe(folder, **SMALL, **changed)
        backend = _CompiledXla(make_mesh(recipe, 0, recipe.parallel.num_workers), threads=1)
        Program(recipe, backend, draws_weights=False).train_step(0, [make_synthetic_micro_batch(recipe)])


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2])
