"""The stage for Neuron publishes all graphs compiled, or nothing, and compiles no graph twice.

neuronx-cc is a stand-in, and the graphs are written by hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import list_files, verify_files
from services.common.artifacts.store import Artifact
from services.common.errors import DeviceError, StorageError
from services.common.recipe.schema import Recipe
from services.common.testing import fork_server
from services.common.testing.commands import start_python
from services.common.testing.recipes import load_with, write_recipe
from services.common.testing.waiting import wait_until
from services.compiler.modules import FLAGS, GRAPH, find_modules
from services.compiler.neuron_cache import COMPILED
from services.compiler.tests import neuron_stage, neuronx_cc
from services.compiler.tests.neuron_stage import FLAGS_OF_TRACE, publish_neuron_cache, write_graph

fork_server.preload("services.compiler.tests.neuron_stage")

REPOSITORY = Path(__file__).resolve().parents[3]


SMALL_TASKS = {"compile__task_memory_gib": 0.25, "compile__task_cpus": 1, "compile__num_workers": 2}
"""Changes of the recipe: this machine has more than eight times the memory of such tasks."""


class Workplace:
    """Folder of a test: a recipe, its graphs, and the stand-in for neuronx-cc."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "fsx"
        self.graphs, self.compiler = folder / "graphs", folder / "bin"

    def recipe(self, **overrides: str) -> Recipe:
        return load_with(self.folder / "small.toml", **overrides)

    def publish(self, **overrides: str) -> Artifact[CompileCacheManifest]:
        return publish_neuron_cache(self.recipe(**overrides), self.root, self.graphs, "inline")[0]

    def compiled(self) -> list[str]:
        """Return the first part of the graphs' names, in the order in which neuronx-cc started on them."""
        return [str(call["module"]).split("_")[1].split("+")[0] for call in neuronx_cc.read_calls(self.compiler)]

    def published(self) -> list[Path]:
        return [path for path in self.root.glob("compile_cache/*/*/manifest.json") if ".partial" not in str(path)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """Make a workplace with three graphs: `small`, `middle` and `large`."""
    workplace = Workplace(tmp_path)
    for name, size in (("small", 1_000), ("large", 3_000_000), ("middle", 20_000)):
        write_graph(workplace.graphs, name, size)
    write_recipe(tmp_path, **SMALL_TASKS)
    neuronx_cc.install(workplace.compiler)
    monkeypatch.setenv("PATH", f"{workplace.compiler}:{os.environ['PATH']}")
    with fork_server.forking_workers():
        yield workplace


def records_of(cache: Artifact[CompileCacheManifest]) -> list[dict[str, Any]]:
    return list(json.loads((cache.path / "modules.json").read_bytes()))


def test_all_graphs_are_compiled_largest_first_and_published_in_libneuronxlas_layout(workplace: Workplace) -> None:
    cache = workplace.publish(compile__num_workers="1")

    assert workplace.compiled() == ["large", "middle", "small"]
    assert all(call["flags"] == FLAGS_OF_TRACE for call in neuronx_cc.read_calls(workplace.compiler))
    verify_files(cache.path, cache.manifest)
    modules = find_modules(cache.path / "graphs")
    assert [module.name for module in modules] == [module.name for module in find_modules(workplace.graphs)]
    names = {path.rpartition("/")[2] for path in list_files(cache.path)}
    assert names == {"model.hlo_module.pb", "compile_flags.json", "model.neff", "model.done", "modules.json"}
    for module, traced in zip(modules, find_modules(workplace.graphs), strict=True):
        assert (module.folder / GRAPH).read_bytes() == (traced.folder / GRAPH).read_bytes()
        assert (module.folder / FLAGS).read_bytes() == (traced.folder / FLAGS).read_bytes()
    assert cache.manifest.compile_cache.graphs_compiled == 3
    assert [phase.name for phase in cache.manifest.compile_cache.phases] == ["trace", "compile", "publish", "verify"]


def test_failing_graphs_are_told_together_nothing_is_published_and_the_rest_is_kept(workplace: Workplace) -> None:
    """What is kept is compiled again where it was damaged between the two commands."""
    neuronx_cc.behave(workplace.compiler, middle="broken", small="garbage")
    write_graph(workplace.graphs, "tiny", 10)

    with pytest.raises(DeviceError) as caught:
        workplace.publish()

    message = str(caught.value)
    assert all(part in message for part in ("MODULE_middle", "[DVR002]", "MODULE_small"))
    assert not workplace.published()
    (log,) = workplace.root.rglob("MODULE_middle*.log")
    assert str(log) in message
    assert "line 0" in log.read_text()

    (neff,) = workplace.root.rglob(f"{COMPILED}/**/MODULE_tiny*/model.neff")
    neff.write_bytes(neff.read_bytes()[:-1] + b"?")
    neff.with_name(".model.neff.0123.tmp").write_bytes(b"left by a killed task")
    neuronx_cc.behave(workplace.compiler)
    before = len(workplace.compiled())
    cache = workplace.publish()

    assert sorted(workplace.compiled()[before:]) == ["middle", "small", "tiny"]
    assert not [path for path in list_files(cache.path) if path.endswith((".log", ".tmp"))]


@pytest.mark.parametrize(
    ("behaviour", "changed", "error", "attempts"),
    [
        ("cut", {}, DeviceError, 1),  # no NEFF
        ("nothing", {}, DeviceError, 1),
        ("hang", {"compile__task_timeout_seconds": "3"}, DeviceError, 1),
        ("busy", {"compile__task_attempts": "2"}, DeviceError, 2),
        ("full", {}, StorageError, 1),
    ],
)
def test_a_graph_that_fails_is_tried_again_only_where_that_may_help(
    workplace: Workplace, behaviour: str, changed: dict[str, str], error: type[Exception], attempts: int
) -> None:
    neuronx_cc.behave(workplace.compiler, large=behaviour)

    with pytest.raises(error, match="MODULE_large"):
        workplace.publish(**changed)

    assert workplace.compiled().count("large") == attempts
    assert not workplace.published()


@pytest.mark.parametrize(
    ("behaviour", "memory_gib"), [("killed-once", 0.5), ("part-killed-once", 0.5), ("busy-once", 0.25)]
)
def test_a_graph_is_tried_again_with_more_memory_where_that_may_be_why(
    workplace: Workplace, behaviour: str, memory_gib: float
) -> None:
    neuronx_cc.behave(workplace.compiler, large=behaviour)

    cache = workplace.publish(compile__num_workers="1")

    # At once, before the smaller graphs: the largest takes longest.
    assert workplace.compiled() == ["large", "large", "middle", "small"]
    records = {record["name"].split("+")[0]: (record["attempts"], record["memory_gib"]) for record in records_of(cache)}
    assert (records["MODULE_large"], records["MODULE_small"]) == ((2, memory_gib), (1, 0.25))


def test_another_version_of_the_compiler_is_refused_with_both_sides(workplace: Workplace) -> None:
    neuronx_cc.install(workplace.compiler, version="2.21.18209.0+043b1bf7")

    with pytest.raises(DeviceError, match=r"2\.24\.8799\.0\+6f62ff7c.* 2\.21\.18209\.0\+043b1bf7"):
        workplace.publish()

    assert not workplace.compiled()


def test_a_trace_that_meets_other_graphs_the_second_time_publishes_nothing(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = neuron_stage.HandWrittenTrace.__call__

    def unsteady(self: Any, folder: Path, title: str, warm_from: Path | None = None) -> None:
        if warm_from:
            write_graph(self.graphs, "surprise", 50)
        trace(self, folder, title, warm_from)

    monkeypatch.setattr(neuron_stage.HandWrittenTrace, "__call__", unsteady)

    with pytest.raises(DeviceError, match="MODULE_surprise"):
        workplace.publish()

    assert not workplace.published()


def start(workplace: Workplace, launch: str = "inline", num_workers: int = 2) -> subprocess.Popen[str]:
    path = write_recipe(workplace.folder, **SMALL_TASKS | {"compile__num_workers": num_workers})
    stage = ["-m", "services.compiler.tests.neuron_stage", str(path), str(workplace.root)]
    return start_python([*stage, str(workplace.graphs), launch], RAY_ADDRESS="")


def wait_for_work(workplace: Workplace, process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Wait until neuronx-cc was started `count` times; returns all descendants of the stage's process."""
    wait_until(lambda: len(workplace.compiled()) >= count, 120, process=process)
    return psutil.Process(process.pid).children(recursive=True)


def test_a_killed_stage_leaves_no_process_and_the_next_command_compiles_what_is_missing(workplace: Workplace) -> None:
    neuronx_cc.behave(workplace.compiler, small="hang-once")
    process = start(workplace)
    wait_until(lambda: len(list(workplace.root.rglob("MODULE_*.json"))) == 2, 120, process=process)
    at_work = wait_for_work(workplace, process, count=3)

    process.kill()
    process.communicate()

    _, alive = psutil.wait_procs(at_work, timeout=60)
    assert not alive
    assert not workplace.published()

    workplace.publish()

    assert sorted(workplace.compiled()) == ["large", "middle", "small", "small"]


def test_sigterm_publishes_nothing_and_leaves_no_process(workplace: Workplace) -> None:
    neuronx_cc.behave(workplace.compiler, large="hang")
    process = start(workplace)
    at_work = wait_for_work(workplace, process, count=2)

    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 75, output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(at_work, timeout=60)
    assert not alive
    assert not workplace.published()


@pytest.mark.parametrize("launch", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced_and_its_graph_compiled_again(workplace: Workplace, launch: str) -> None:
    neuronx_cc.behave(workplace.compiler, large="hang-once")
    process = start(workplace, launch, num_workers=1)
    at_work = wait_for_work(workplace, process, count=1)
    group = next(each for each in at_work if "child_process_group.py" in " ".join(each.cmdline()))
    worker = group.parent()
    assert worker is not None
    assert worker.pid != process.pid

    worker.kill()
    output, _ = process.communicate(timeout=300)

    assert process.returncode == 0, output
    assert workplace.compiled() == ["large", "large", "middle", "small"]
    _, alive = psutil.wait_procs(at_work, timeout=60)
    assert not alive
    (manifest,) = workplace.published()
    assert all(module.is_compiled for module in find_modules(manifest.parent / "graphs"))
