"""Small real inputs for the tests of the contracts: a recipe, and a stage that publishes a compile cache."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from services.common.artifacts import process
from services.common.artifacts.compile_cache import CompileCacheManifest, CompileCachePayload
from services.common.artifacts.files import describe_files
from services.common.artifacts.manifest import MANIFEST, InputLink
from services.common.artifacts.store import Address, Artifact, Draft, Workspace, publish_once
from services.common.entry_point import exit_code_of
from services.common.recipe import Recipe, fingerprint
from services.common.recipe_file import load_recipe

REPOSITORY = Path(__file__).parents[3]
ID = "0123456789abcdef"
FILES = {"graphs/ab/inner/one.bin": b"one" * 100, "graphs/two.bin": b"two" * 100, "three.json": b"{}"}

# Children of a fork server start in milliseconds and, unlike forks of the test's own process, without its threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])

RECIPE = """
name = "small"
[corpus]
name = "sentences"
sequence_length = 16
sources = [{ uri = "nowhere" }]
[tokenizer.train]
vocab_size = 300
[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
[batch]
micro_batch_size = 2
global_batch_size = 8
[optimizer]
learning_rate = 1e-2
min_learning_rate = 1e-3
warmup_steps = 2
decay_steps = 20
[train]
max_steps = 20
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path


def make_recipe(folder: Path, **overrides: str) -> Recipe:
    """The small recipe; overrides as `train__max_steps="7"`."""
    return load_recipe(write_recipe(folder), {key.replace("__", "."): value for key, value in overrides.items()})


def address_in(root: Path, identifier: str = ID) -> Address:
    return Address(root, "compile_cache", "small", identifier)


def fill(workspace: Workspace, files: dict[str, bytes] = FILES, inputs: tuple[InputLink, ...] = ()) -> Draft:
    """What a stage's `build` does: write the files and describe them."""
    for name, content in files.items():
        path = workspace.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    payload = CompileCachePayload(
        target="cpu",
        program_fingerprint="0" * 64,
        facts={"torch": "none"},
        graphs_compiled=2,
        graphs_missed_by_verification=0,
        world_size_traced=1,
        phases=(),
    )
    return Draft(payload, inputs)


def publish(
    root: Path, recipe: Recipe, identifier: str = ID, build: Callable[[Workspace], Draft] = fill
) -> tuple[Artifact[CompileCacheManifest], bool]:
    return publish_once(address_in(root, identifier), CompileCacheManifest, "compiler", recipe, build)


def forge(folder: Path, change: Callable[[dict[str, Any]], object] = lambda fields: None) -> None:
    """Write an artifact's manifest as another program might: it fits the files as they are now, it is sealed, and
    `change` has had its fields.
    """
    fields = json.loads((folder / MANIFEST).read_bytes())
    del fields["seal"]
    fields["files"] = [entry.model_dump(mode="json") for entry in describe_files(folder)]
    change(fields)
    (folder / MANIFEST).write_text(json.dumps({**fields, "seal": fingerprint(fields)}), encoding="utf-8")


def start_process(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    child = _CONTEXT.Process(target=function, args=arguments)
    child.start()
    return child


def write_foreign_lock(path: Path, beats: int = 0) -> None:
    """A lock as a writer on another machine leaves it, or keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = {"token": "f" * 32, "node": "another-machine", "pid": 1, "started": "1 ticks after boot", "beats": beats}
    path.write_text(json.dumps(owner), encoding="utf-8")


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def count_operations(root: Path, chosen: int = -1, signum: signal.Signals = signal.SIGKILL) -> list[str]:
    """The list that this process's operations on the file system below `root` are added to from now on.

    Before the chosen one of them the process sends itself a signal.
    """
    operations: list[str] = []

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "shutil.rmtree"} and str(
            arguments[0]
        ).startswith(str(root)):
            operations.append(event)
            if len(operations) == chosen + 1:
                os.kill(os.getpid(), signum)

    sys.addaudithook(count)
    return operations


def publish_and_die(root: Path, recipe: Recipe, fatal_operation: int) -> None:
    """Publish in a process that kills itself before its n-th operation on the file system below `root`.

    Without dying it exits with the number of operations that there were.
    """
    operations = count_operations(root, fatal_operation)
    publish(root, recipe)
    os._exit(len(operations))


def publish_elsewhere_and_freeze(root: Path, recipe: Recipe, operation: int) -> None:
    """Publish on what others take for another machine, in a process that stops itself before its n-th operation.

    It ends with the exit code that the command would end with, and writes `<root>.log`.
    """
    logging.basicConfig(level=logging.INFO, filename=f"{root}.log", force=True)
    process.node_name = lambda: "another-machine"
    count_operations(root, operation, signal.SIGSTOP)

    def work() -> int:
        publish(root, recipe)
        return 0

    os._exit(exit_code_of(work))


def publish_slowly(root: Path, recipe: Recipe, name: str) -> None:
    """Publish once the file `go` exists; what happens can be seen in the files `<name>.building|log|done`."""
    folder = root.parent
    logging.basicConfig(level=logging.INFO, filename=folder / f"{name}.log", force=True)

    def build(workspace: Workspace) -> Draft:
        (folder / f"{name}.building").touch()
        wait_until((folder / "go").exists)
        return fill(workspace)

    artifact, is_new = publish(root, recipe, build=build)
    partial = folder / f"{name}.tmp"
    partial.write_text(f"{artifact.manifest.content_digest} {is_new}", encoding="utf-8")
    partial.rename(folder / f"{name}.done")
