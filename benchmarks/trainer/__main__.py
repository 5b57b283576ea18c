"""Measures the trainer and its alternatives with the same model, weights, tokens and optimizer, in one run.

    python -m benchmarks.trainer --install-peers          all rows, 3 rounds of 10 steps each
    python -m benchmarks.trainer --rows ours_eager,hugging_face_eager --rounds 5
    python -m benchmarks.trainer --profile ours_compiled  time of a step by kind of operation
    python -m benchmarks.trainer --only speed --recipe recipes/llama2-1b-cuda.toml --micro-batches 8   on a GPU

Without --recipe the model is a Llama of 24.4 million parameters in bfloat16 autocast, in one process with --threads
threads. Every row runs in a process of its own, and the rows of a round run in turn, so that other load on the machine
meets all of them. The first 3 steps of a row are not measured. Tokens/s are those of the median step of all rounds, and
of the fastest step. FLOPs are counted equally for all rows (`causal_flops_per_token`), and compared with the fastest
matrix product of the same process, before and after. On a GPU with a published peak, MFU is PaLM's share of it. A row
whose peak changed by more than 5 % is marked: the machine had other load. The first three losses of all trainers must
agree to 1e-3. Raw samples go to .benchmarks/.

The second table, of `benchmarks.trainer.start_rows`, has the times of a start, of a restart and of checkpoints.

`--install-peers` installs litgpt, and accelerate for transformers' Trainer, in a virtual environment in .benchmarks/.
nanoGPT is in no package index, so it has no row; its model has the same matrices.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.rounds import measure_rounds
from benchmarks.trainer.measurement import PEERS, ROWS, STEPS, Measurement, measure
from benchmarks.trainer.profile import print_profile
from benchmarks.trainer.start_rows import make_table
from benchmarks.trainer.workbench import Workbench
from services.common.hardware.gpus import sum_peaks
from services.common.recipe.derived import causal_flops_per_token, palm_flops_per_token, tokens_per_step

REPOSITORY = Path(__file__).parents[2]
OUTPUT = REPOSITORY / ".benchmarks"
START_RECIPE = REPOSITORY / "recipes" / "tiny-cpu.toml"
PEERS_PYTHON = OUTPUT / "peers" / "bin" / "python"
PACKAGES = (
    "litgpt==0.5.13",
    "lightning==2.6.6",
    "pytorch-lightning==2.6.6",
    "lightning-utilities==0.15.3",
    "torchmetrics==1.9.0",
    "jsonargparse==4.53.0",
    "docstring-parser==0.18.0",
    "typeshed-client==2.14.0",
    "importlib-resources==7.1.0",
    "accelerate==1.15.0",
    "psutil==7.2.2",
)
"""Packages of the peers that the tests' environment lacks; torch, transformers and others come from there."""
TABLES = ("speed", "start")
MOVED = 0.05
AGREED = 1e-3


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    if arguments.row:
        bench = _make_workbench(arguments, arguments.folder)
        arguments.result.write_text(json.dumps(asdict(measure(arguments.row, bench))), encoding="utf-8")
        return 0
    if arguments.install_peers:
        install_peers()
    print(f"machine   {describe_machine()}, {arguments.threads} threads", flush=True)
    if (arguments.profile or "speed" in arguments.only) and not measure_speed(arguments):
        return 1
    if "start" in arguments.only and not arguments.profile:
        print(make_table(START_RECIPE, OUTPUT / "start", arguments.rounds))
    return 0


def measure_speed(arguments: argparse.Namespace) -> bool:
    """Print the table of tokens/s, or a row's profile; returns whether the rows' losses agree."""
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-", dir=arguments.work) as folder:
        bench = _make_workbench(arguments, Path(folder))
        bench.fill()
        if arguments.profile:
            os.environ["OMP_NUM_THREADS"] = str(bench.threads)
            print_profile(arguments.profile, bench)
            return True
        rows = _rows_that_run(arguments.rows or ROWS)
        measured = measure_rounds(rows, arguments.rounds, partial(_run_in_process, bench))
        print(table(measured, bench))
        print(f"raw samples: {save(measured, bench)}", flush=True)
        return do_losses_agree(measured)


def table(measured: dict[str, list[Measurement]], bench: Workbench) -> str:
    """Format tokens/s, shares of the peak, and ratios to Hugging Face's loop and to the fastest similar peer."""
    recipe = bench.recipe()
    tokens, flops = tokens_per_step(recipe), causal_flops_per_token(recipe)
    rates = {row: tokens / statistics.median(_seconds(all_)) for row, all_ in measured.items()}
    heads = ("tokens/s", "fastest", "of peak", "MFU", "x HF loop", "x best peer", "first step", "peak MB")
    lines = [f"{'':<24}" + "".join(f"{head:>12}" for head in heads)]
    for row, all_ in measured.items():
        peak = statistics.median(peak for each in all_ for peak in each.peaks)
        peers = [rate for name, rate in rates.items() if not name.startswith("ours") and _is_like(name, row)]
        loop, datasheet = rates.get("hugging_face_eager"), sum_peaks([all_[0].device_name])
        cells = [
            f"{rates[row]:,.0f}",
            f"{tokens / min(_seconds(all_)):,.0f}",
            f"{rates[row] * flops / peak:.1%}",
            f"{rates[row] * palm_flops_per_token(recipe) / datasheet:.1%}" if datasheet else "",
            f"{rates[row] / loop:.2f}" if loop else "",
            f"{rates[row] / max(peers):.2f}" if peers and row.startswith("ours") else "",
            f"{min(each.first_step_seconds for each in all_):.1f} s" if row in STEPS else "",
            f"{max(each.peak_memory_bytes for each in all_) / 1e6:,.0f}",
        ]
        notes = []
        if waited := [share for each in all_ for share in _data_shares(each)]:
            notes.append(f"waits for data {statistics.median(waited):.4%} of a step")
        if moved := [each for each in all_ if abs(each.peaks[1] / each.peaks[0] - 1.0) > MOVED]:
            notes.append(f"PEAK MOVED in {len(moved)} of {len(all_)} rounds")
        lines.append(f"{row:<24}" + "".join(f"{cell:>12}" for cell in cells) + f"  {'; '.join(notes)}".rstrip())
    devices = {each.device_name or "CPU" for all_ in measured.values() for each in all_}
    peaks = sorted(peak for all_ in measured.values() for each in all_ for peak in each.peaks)
    loads = sorted(load for all_ in measured.values() for each in all_ for load in each.loads)
    lines.append(
        f"{', '.join(sorted(devices))}; peak of products: {peaks[0] / 1e9:.0f} to {peaks[-1] / 1e9:.0f} GFLOP/s, median"
    )
    lines[-1] += f" {statistics.median(peaks) / 1e9:.0f}; load average {loads[0]:.1f} to {loads[-1]:.1f}"
    return "\n".join(lines)


def do_losses_agree(measured: dict[str, list[Measurement]]) -> bool:
    """Compare the first three losses of all trainers, and print the rows that differ."""
    firsts = {row: all_[0].losses[:3] for row, all_ in measured.items() if all_[0].losses}
    reference = next(iter(firsts.values()), [])
    differences = {
        row: max(abs(one / other - 1.0) for one, other in zip(losses, reference, strict=True))
        for row, losses in firsts.items()
    }
    for row, difference in differences.items():
        if difference > AGREED:
            print(f"{row} trains another model: its first losses are {firsts[row]}, expected {reference}")
    return max(differences.values(), default=0.0) <= AGREED


def save(measured: dict[str, list[Measurement]], bench: Workbench) -> Path:
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / f"trainer-{time.strftime('%Y%m%d-%H%M%S')}.json"
    raw = {
        "machine": describe_machine(),
        "system": platform.platform(),
        "threads": bench.threads,
        "recipe": bench.recipe().model_dump(mode="json"),
        "rows": {row: [asdict(each) for each in all_] for row, all_ in measured.items()},
    }
    path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return path


def install_peers() -> None:
    """Make the peers' virtual environment, which adds their packages to those of the tests' environment."""
    uv = [str(REPOSITORY / "bootstrap"), "uv"]
    folder = PEERS_PYTHON.parents[1]
    if not PEERS_PYTHON.exists():
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", str(PEERS_PYTHON), *PACKAGES]
    subprocess.run(install, check=True, cwd=REPOSITORY)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "millrace.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def _make_workbench(arguments: argparse.Namespace, folder: Path) -> Workbench:
    return Workbench(
        folder, arguments.steps, arguments.threads, arguments.recipe, arguments.micro_batches, arguments.reduction
    )


def _rows_that_run(rows: Sequence[str]) -> list[str]:
    """Return the rows whose libraries are installed, and print the names of the others."""
    has_peers = PEERS_PYTHON.exists() or importlib.util.find_spec("litgpt") is not None
    if not has_peers and (absent := [row for row in rows if row in PEERS]):
        print(f"left out: {', '.join(absent)}: not installed; --install-peers installs them")
    return [row for row in rows if has_peers or row not in PEERS]


def _run_in_process(bench: Workbench, row: str) -> Measurement:
    result, log = bench.folder / "result.json", bench.folder / f"{row}.log"
    python = str(PEERS_PYTHON) if row in PEERS and PEERS_PYTHON.exists() else sys.executable
    options = ["--folder", str(bench.folder), "--result", str(result), "--steps", str(bench.steps)]
    options += ["--micro-batches", str(bench.num_micro_batches), "--reduction", bench.reduction]
    options += ["--recipe", str(bench.recipe_file)] if bench.recipe_file else []
    with log.open("wb") as file:
        done = subprocess.run(
            [python, "-m", "benchmarks.trainer", "--row", row, "--threads", str(bench.threads), *options],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(bench.threads),
                "TORCHINDUCTOR_CACHE_DIR": str(OUTPUT / "graphs" / row),
                "TOKENIZERS_PARALLELISM": "false",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{row} ended with {done.returncode}:\n{log.read_text(encoding='utf-8')[-4_000:]}")
    return Measurement(**json.loads(result.read_text(encoding="utf-8")))


def _seconds(all_: Sequence[Measurement]) -> list[float]:
    return [seconds for each in all_ for seconds in each.seconds]


def _data_shares(measurement: Measurement) -> list[float]:
    pairs = zip(measurement.data_seconds, measurement.seconds, strict=False)
    return [data / seconds for data, seconds in pairs]


def _is_like(one: str, other: str) -> bool:
    return ("compiled" in one) == ("compiled" in other)


def _names(known: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}")
    return names


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a row in one round")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--recipe", type=lambda text: Path(text).absolute(), help="recipe of the speeds' model and device"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--reduction", choices=("exact", "fast"), default="exact", help="sums of our rows")
    parser.add_argument("--only", type=lambda text: _names(TABLES, text), default=TABLES, help=", ".join(TABLES))
    parser.add_argument(
        "--rows", type=lambda text: _names(ROWS, text), help=f"rows to run (default: all): {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--profile", choices=STEPS, help="print the time of this row's step by kind of operation, and exit"
    )
    parser.add_argument("--install-peers", action="store_true", help="install the peers' packages in .benchmarks/")
    parser.add_argument("--work", type=Path, help="folder for temporary files")
    for internal in ("--row", "--folder", "--result"):
        parser.add_argument(internal, type=str if internal == "--row" else Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
