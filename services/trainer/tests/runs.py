"""Runs the trainer's command as a user does, and reads the files that it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import safetensors
import torch
import xxhash

from services.common.artifacts.checkpoint import CheckpointManifest, ShardOrigin, step_of
from services.common.artifacts.store import open_artifact
from services.common.process.entry_point import exit_code_of
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.state import StateKind, StateSlice
from services.common.program.step import Program
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Recipe
from services.common.testing.commands import start_python
from services.common.testing.manifests import Fields, forge
from services.trainer.__main__ import main
from services.trainer.checkpoints.index import tabulate, write_index
from services.trainer.checkpoints.loader import find_checkpoint, load_part
from services.trainer.checkpoints.shards import ORIGIN, ShardReader
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import Job
from services.trainer.metrics.records import read_metrics

REPOSITORY = Path(__file__).resolve().parents[3]
ALONE = Mesh(0, data_parallel_size=1)
OF_A_RUN = ("summary", "report", "sample", "evaluate", "export", "inspect-checkpoint")
"""Commands that take a run in place of a recipe."""


def start_trainer(
    recipe: Path, root: Path, *options: str, launch: str = "inline", temporary: Path | None = None
) -> subprocess.Popen[str]:
    command = ["-m", "services.trainer", "train", "--recipe", str(recipe), "--root", str(root), "--launch", launch]
    # A killed command leaves its node-local folder.
    return start_python([*command, *options], TMPDIR=str(temporary or root.parent))


def run_trainer(recipe: Path, root: Path, *options: str, **settings: Any) -> tuple[int, str]:
    """Return the exit code and everything that was printed; settings as of `start_trainer`."""
    process = start_trainer(recipe, root, *options, **settings)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def call_trainer(
    capfd: pytest.CaptureFixture[str], recipe: Path, root: Path, *options: str, command: str = "train", run: str = ""
) -> tuple[int, str]:
    """Run a command in this process, if the test sends it no signal; see `run_trainer`.

    One of OF_A_RUN gets `run`, or the name of the recipe's file, which is the prefix of its runs.
    """
    given = [run or recipe.stem] if command in OF_A_RUN else ["--recipe", str(recipe)]
    exit_code = exit_code_of(lambda: main([command, *given, "--root", str(root), *options]))
    printed = capfd.readouterr()
    return exit_code, printed.out + printed.err


def train_alone(capfd: pytest.CaptureFixture[str], recipe: Path, root: Path, *options: str) -> tuple[int, str]:
    """Train with one worker, the only process that has to start; see `call_trainer`."""
    return call_trainer(capfd, recipe, root, "--launch=inline", "--parallel.data_parallel_size=1", *options)


def checkpoints(root: Path) -> dict[str, Path]:
    """Return the committed checkpoints by name, in the order of their steps."""
    folders = [path.parent for path in root.glob("checkpoint/*/step-*[0-9]/manifest.json")]
    return {folder.name: folder for folder in sorted(folders, key=lambda folder: step_of(folder.name) or 0)}


def state_hash(checkpoint: Path) -> str:
    """Return a hash over all weights and moments, independent of the layout of workers."""
    opened = open_artifact(checkpoint, CheckpointManifest)
    recipe = Recipe.model_validate_json(json.dumps(opened.manifest.recipe))
    shapes = parameter_shapes(recipe.model)
    state = {
        StateSlice.whole(kind, name, shape): torch.empty(shape)
        for kind in get_args(StateKind)
        for name, shape in sorted(shapes.items())
    }
    ShardReader(opened, shapes).read(state)
    hasher = xxhash.xxh3_128()
    for tensor in state.values():
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()


def problem_of(job: Job, step: int, mesh: Mesh = ALONE) -> str:
    """Return why a worker cannot load a run's checkpoint, as rank 0 or the worker finds it; empty if it is intact."""
    told, own_shards = find_checkpoint(job, mesh, step)
    if told.checkpoint is None:
        return told.problem
    program = Program(job.recipe, TorchNative(mesh, 1, job.recipe.train.reduction), draws_weights=False)
    return load_part(job, told.checkpoint, own_shards[mesh.rank], program.state.read())


def vouch_for_files(folder: Path, change: Callable[[Fields], object] = lambda fields: None) -> None:
    """Write a checkpoint's index again, for the slices that its shards have now, and then its manifest as `forge`."""
    slices: list[tuple[StateSlice, int]] = []
    for number, path in enumerate(sorted(folder.glob("shard-*"))):
        with safetensors.safe_open(path, "pt") as file:
            origin = ShardOrigin.model_validate_json(file.metadata()[ORIGIN])
            for key in file.keys():  # noqa: SIM118 - no mapping
                with suppress(ValueError):  # a key that no index can have
                    slices.append((StateSlice.parse(key), number))
    write_index(folder, origin, tabulate(slices))
    forge(folder, change)


def file_states(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and the time of the last change of each file below a folder, and zeros for each folder."""
    states = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (each.st_size, each.st_mtime_ns) if path.is_file() else (0, 0) for path, each in states.items()}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the workers of an inline command: forks of its fork server, or new interpreters on macOS."""
    children = psutil.Process(process.pid).children()
    servers = [child for child in children if "forkserver" in command_line_of(child)]
    forked = [worker for server in servers for worker in server.children() if "forkserver" in command_line_of(worker)]
    return forked or [child for child in children if "spawn_main" in command_line_of(child)]


def command_line_of(process: psutil.Process) -> str:
    """Return the command line or title of a process; empty where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill_session(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Send a signal to the command and everything that it started, as a lost machine would."""
    os.killpg(process.pid, number)
    process.wait()


@dataclass(frozen=True)
class RunView:
    """Records and starts of the only run in a root."""

    records: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    starts: list[str]
    """Lines that rank 0 logs when it begins."""

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    @property
    def validation_losses(self) -> list[float]:
        return [evaluation["loss"] for evaluation in self.evaluations]


def read_run(root: Path) -> RunView:
    folders = list(root.glob("run/*/"))
    if not folders:
        return RunView([], [], [])
    log = folders[0] / "logs" / "rank-00000.log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    starts = [line for line in lines if "starting a new run" in line or "resuming after" in line]
    return RunView(read_metrics(folders[0]), read_evaluations(folders[0]), starts)


def read_charts(page: str) -> dict[str, Any]:
    """Return the `runs`, `marks` and `charts` of a page's element `millrace-charts`."""
    found = re.search(r'<script type="application/json" id="millrace-charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def read_curves(page: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return the points of each curve by its chart and its name."""
    return {
        (name, curve["name"]): list(zip(curve["steps"], curve["values"], strict=True))
        for name, each in read_charts(page)["charts"].items()
        for curve in each["curves"]
    }
