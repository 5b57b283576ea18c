"""Measures data-parallel workers on this machine: exact and fast sums, ZeRO-1 to 3, and FSDP2 of torch.

    python -m benchmarks.trainer.worker_rows [--rounds 3] [--steps 4] [--micro-batches 4] [--tokens 4096] [--workers 2]
        [--rows "fast, ZeRO-1;exact, ZeRO-3"]

The model is the workbench's, compiled, with the same weights, tokens, clipping and AdamW for all rows; FSDP2 shards
transformers' model by layer, and reduces gradients in float32 once a step. A row runs in processes of its own with one
thread each, and the rows of a round run in turn. Tokens/s are those of the median step of all rounds; the ratio is to
the first row. The losses of all rows must agree to 1e-3, and those of exact sums to the bit where the graphs are the
same: ZeRO-3 has graphs of layers, which round elsewhere in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.rounds import measure_rounds
from benchmarks.trainer.speed_rows import hugging_face_loss, hugging_face_model, write_weights
from benchmarks.trainer.workbench import RECIPE, STEPS_LEFT_OUT, Workbench
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh, make_mesh
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.testing.recipes import write_recipe

GRAPHS = Path(__file__).parents[2] / ".benchmarks/graphs/worker_rows"
ROWS = {
    "fast, ZeRO-1": ("fast", "1"),
    "exact, ZeRO-1": ("exact", "1"),
    "fast, ZeRO-2": ("fast", "2"),
    "exact, ZeRO-2": ("exact", "2"),
    "fast, ZeRO-3": ("fast", "3"),
    "exact, ZeRO-3": ("exact", "3"),
}
FSDP2 = "transformers, FSDP2"


@dataclass(frozen=True)
class Call:
    """What a worker of a row is told."""

    row: str
    bench: Workbench
    result: Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.worker_rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a row in one round")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step and worker")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", default=";".join([*ROWS, FSDP2]), help="rows, of which the first is the base")
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(GRAPHS)
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as name:
        folder = Path(name)
        length = RECIPE["corpus__sequence_length"]
        sizes = {"batch__micro_batch_size": arguments.tokens // length, "batch__global_batch_size": arguments.tokens}
        recipe = write_recipe(folder, **RECIPE | sizes, parallel__data_parallel_size=arguments.workers)
        count = arguments.micro_batches * arguments.workers
        bench = Workbench(folder, arguments.steps, 1, recipe, count)
        bench.fill()
        rows = arguments.rows.split(";")
        measured = measure_rounds(rows, arguments.rounds, partial(_measure, bench, arguments.workers))
    tokens, first = count * arguments.tokens, next(iter(measured.values()))
    seconds = {
        row: statistics.median(each for one in all_ for each in one["seconds"]) for row, all_ in measured.items()
    }
    print(
        f"{describe_machine()}, {arguments.workers} workers, {arguments.micro_batches} micro-batches of "
        f"{arguments.tokens} tokens a step"
    )
    for row, all_ in measured.items():
        peak = max(one["peak_bytes"] for one in all_)
        print(
            f"{row:<22}{tokens / seconds[row]:>9,.0f} tokens/s{seconds[rows[0]] / seconds[row]:>7.3f}"
            f"{peak / 1e6:>9,.0f} MB"
        )
    exact = {row: all_[0]["losses"] for row, all_ in measured.items() if row in ("exact, ZeRO-1", "exact, ZeRO-2")}
    far = [row for row, all_ in measured.items() if abs(all_[0]["losses"][2] / first[0]["losses"][2] - 1) > 1e-3]
    if far or len({tuple(losses) for losses in exact.values()}) > 1:
        print(f"other losses than expected: {far or exact}")
        return 1
    return 0


def _measure(bench: Workbench, workers: int, row: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        result = Path(name) / "result.json"
        run_workers(inline, _run_row, Call(row, bench, result), WorkerGroupSpec(workers, 1, workers, Path(name)))
        return json.loads(result.read_text(encoding="utf-8"))


def _run_row(call: Call, environment: WorkerEnvironment) -> None:
    group = ProcessGroup.join(environment.rank, environment.world_size, environment.rendezvous)
    bench, losses, seconds = call.bench, list[float](), list[float]()
    run = (_fsdp2 if call.row == FSDP2 else partial(_ours, ROWS[call.row]))(bench, environment)
    for step in range(bench.num_steps):
        group.barrier()
        started = time.perf_counter()
        losses.append(run(step))
        seconds.append(time.perf_counter() - started)
    group.barrier()
    if environment.rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"losses": losses, "seconds": seconds[STEPS_LEFT_OUT:], "peak_bytes": peak}
        call.result.write_text(json.dumps(found), encoding="utf-8")
    group.leave()


def _ours(settings: tuple[str, str], bench: Workbench, environment: WorkerEnvironment) -> Callable[[int], float]:
    reduction, stage = settings
    recipe = replace(bench, reduction=reduction).recipe(is_compiled=True)
    recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"zero_stage": int(stage)})})
    mesh = make_mesh(recipe, environment.rank, environment.world_size)
    backend = TorchNative(mesh, bench.threads, reduction)
    program = Program(recipe, backend)
    write_weights(program, bench)

    def run(step: int) -> float:
        batches = bench.tokens(step).chunk(bench.num_micro_batches)
        micro_batches = [MicroBatch(batches[number]) for number in mesh.share(len(batches))]
        return backend.read(program.train_step(step, micro_batches)._asdict())["loss"]

    return run


def _fsdp2(bench: Workbench, environment: WorkerEnvironment) -> Callable[[int], float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    torch.set_num_threads(bench.threads)
    model, settings = hugging_face_model(bench), bench.recipe().optimizer
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.min_learning_rate, betas=betas, eps=settings.epsilon, fused=True)
    mesh = Mesh(environment.rank, environment.world_size)

    def run(step: int) -> float:
        batches = bench.tokens(step).chunk(bench.num_micro_batches)
        own, total = list(mesh.share(len(batches))), torch.zeros(1)
        for number in own:
            model.set_requires_gradient_sync(number == own[-1])
            loss = hugging_face_loss(model, batches[number]) / len(own)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total)
        return total.item() / environment.world_size

    return run


if __name__ == "__main__":
    sys.exit(main())
