"""Text to a trained model through the three commands, meeting only in files."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.common.testing import fork_server
from services.common.testing.commands import run_python, start_python
from services.common.testing.waiting import wait_until
from services.trainer.tests.runs import checkpoints, flip_a_bit, state_hash
from tests.architecture.documents import read_runbooks
from tests.command import call as call_command
from tests.small import write_notes, write_small_recipe

pytestmark = pytest.mark.timeout(900)  # the first test waits for the whole pipeline

fork_server.preload("services.trainer.supervision.supervise")

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Call a command as `run` does, but in this process, which has imported torch already."""
    with fork_server.forking_workers():
        yield lambda stage, *options: call_command(capfd, f"services.{stage}.__main__", *options)


def run(stage: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", f"services.{stage}", *options], **environment)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the options of all stages: a recipe over a folder of notes, and a root."""
    folder = tmp_path_factory.mktemp("a pipeline")  # a space: paths are not for splitting
    recipe = write_small_recipe(folder / "small.toml", str(write_notes(folder / "notes")))
    return ("--recipe", str(recipe), "--root", str(folder / "fsx"))


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make the temporary directory of all commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        yield Path(os.environ["TMPDIR"])


@pytest.fixture(scope="module")
def pipeline(options: tuple[str, ...], temporary: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run every stage to its end, the compiler after a killed attempt.

    The trainer's first attempt has one worker, inline, and is stopped; the second has two on Ray, which shard the
    optimizer's state.
    """
    done = {"tokenizer": run("tokenizer", *options)}
    kill_while_compiling(options)
    done["compiler"] = run("compiler", *options)
    done["stopped trainer"] = stop_while_training(options, "--launch=inline", "--parallel.data_parallel_size=1")
    done["trainer"] = run("trainer", *options, "--launch=ray", "--parallel.zero_stage=1")
    return done


def kill_while_compiling(options: tuple[str, ...]) -> None:
    """kill -9 the compiler stage after its first compiled files: no process survives, and nothing is published."""
    collection = Path(options[-1]) / "compile_cache" / "cpu"
    with start_python(["-m", "services.compiler", *options]) as process:
        wait_until(lambda: any(collection.glob("*.scratch/*/compile/cache/*/*")), 120, process=process)
        at_work = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(at_work, timeout=30)
    assert not alive
    assert not list(collection.glob("*[0-9a-f]/manifest.json"))


def stop_while_training(options: tuple[str, ...], *others: str) -> subprocess.CompletedProcess[str]:
    """Send SIGTERM to the trainer's command after the first steps, as a scheduler does."""
    with start_python(["-m", "services.trainer", *options, *others]) as process:
        metrics = functools.partial(Path(options[-1]).glob, "run/*/metrics.jsonl")
        wait_until(lambda: any(path.stat().st_size for path in metrics()), 200, process=process)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@pytest.fixture
def root(options: tuple[str, ...], pipeline: dict[str, subprocess.CompletedProcess[str]]) -> Path:
    expected = dict.fromkeys(pipeline, 0) | {"stopped trainer": 75}
    assert {stage: done.returncode for stage, done in pipeline.items()} == expected, "\n".join(
        done.stdout for done in pipeline.values()
    )
    return Path(options[-1])


def test_the_three_commands_train_a_model_without_a_compile_miss(root: Path, temporary: Path) -> None:
    (run_folder,) = root.glob("run/*/")
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    attempts = [json.loads(line) for line in (run_folder / "attempts.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 61))
    assert records[-1]["loss"] < records[0]["loss"] - 1.5
    assert "validation_loss" in records[-1]
    assert list((run_folder / "tensorboard").iterdir())
    assert [attempt["workers"] for attempt in attempts] == [1, 2]
    assert [attempt["launch"] for attempt in attempts] == ["inline", "ray"]
    stopped, completed = attempts
    assert stopped["ended_by"] == "sigterm"
    assert 0 < stopped["last_step"] == completed["first_step"] < 60
    heartbeats = [json.loads(path.read_text()) for path in sorted(run_folder.glob("heartbeats/rank-*.json"))]
    assert [heartbeat["rank"] for heartbeat in heartbeats] == [0, 1]
    for attempt in attempts:
        assert (attempt["graphs_compiled"], attempt["new_cache_files"]) == (0, 0)
    assert not list(temporary.rglob("*.gch"))  # precompiled C++ headers, which only a compilation needs


def test_an_evaluation_by_the_command_compiles_nothing_and_gives_the_run_s_numbers(
    root: Path, options: tuple[str, ...], call: Call
) -> None:
    given = ("small", *options[2:], "--launch=inline", "--json", "--compile.require_warm=true")
    done = call("trainer", "evaluate", *given)
    assert done.returncode == 0, done.stderr
    evaluated = json.loads(done.stdout)
    (run_folder,) = root.glob("run/*/")
    records = [json.loads(line) for line in (run_folder / "evaluations.jsonl").read_text().splitlines()]

    assert (evaluated["graphs_compiled"], evaluated["new_cache_files"]) == (0, 0)
    assert {record["step"] for record in records} >= {0, 15, 30, 45, 60}
    assert (evaluated["step"], evaluated["loss"]) == (60, records[-1]["loss"])
    [source] = evaluated["sources"].values()
    assert source["loss"] == evaluated["loss"]
    assert 0 < evaluated["standard_error"] < evaluated["loss"]
    assert 0 < evaluated["bits_per_byte"] < 8


def test_a_second_round_finds_everything_published(root: Path, options: tuple[str, ...], call: Call) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("manifest.json")}
    outputs = {stage: call(stage, *options).stdout for stage in ("tokenizer", "compiler", "trainer")}
    assert "already published" in outputs["tokenizer"]
    assert "already published" in outputs["compiler"]
    assert "the run is complete" in outputs["trainer"]
    assert {path: path.stat().st_mtime_ns for path in root.rglob("manifest.json")} == before


def test_every_artifact_verifies(root: Path, call: Call) -> None:
    verified = call("common.artifacts", "verify", str(root))
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.count("ok ") == 4  # corpus, cache, two checkpoints


@pytest.fixture
def place(root: Path, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory as the documents assume it: the artifacts in ./fsx, and the demo's recipe."""
    shutil.copytree(root, tmp_path / "fsx")
    (tmp_path / "recipes").mkdir()
    shutil.copy(options[1], tmp_path / "recipes" / "tiny-cpu.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_runbooks_end_as_their_pages_say(place: Path, call: Call) -> None:
    """A run in good order; the pages about damage need another."""
    lines = lines_that_run_here(lambda name: not name.endswith("-damaged"))
    assert len(lines) > 20
    assert [line for line in lines if not ends_as_said(line, place, call)] == []


def test_the_commands_for_a_damaged_checkpoint_end_as_their_page_says(place: Path, call: Call) -> None:
    flip_a_bit(checkpoints(place / "fsx")["step-00000060"] / "shard-00000.safetensors")
    lines = lines_that_run_here(lambda name: name == "checkpoint-damaged")
    assert [line for line in lines if not ends_as_said(line, place, call)] == []
    assert list(checkpoints(place / "fsx")) == ["step-00000050"]


def test_the_commands_for_a_damaged_corpus_end_as_their_page_says(place: Path, call: Call) -> None:
    (shard, *_) = sorted(place.glob("fsx/corpus/*/*/train/shard-*.arrow"))
    content = shard.read_bytes()
    flip_a_bit(shard)
    lines = lines_that_run_here(lambda name: name == "corpus-damaged")
    assert [line for line in lines if not ends_as_said(line, place, call)] == []
    assert shard.read_bytes() == content


def lines_that_run_here(is_chosen: Callable[[str], bool]) -> list[str]:
    """Commands of the pages whose names are chosen, each once."""
    blocks = [block for page in read_runbooks() if is_chosen(page.path.stem) for block in page.command_blocks()]
    return list(dict.fromkeys(line for block in blocks if block.mark == "runs here" for line in block.lines))


def ends_as_said(line: str, place: Path, call: Call) -> bool:
    """Run a line of a runbook in `place`. Its comment says the exit code, if that is not 0."""
    names: dict[str, Callable[[], str]] = {
        "RUN": lambda: next((place / "fsx").glob("run/*/")).name,
        "STEP": lambda: "step-00000060",
        "CORPUS": lambda: "/".join(next((place / "fsx").glob("corpus/*/*/manifest.json")).parts[-3:-1]),
    }
    line = re.sub(rf"\b(?:{'|'.join(names)})\b", lambda found: names[found[0]](), line)
    said = re.search(r"# .*\bexit code (\d+)", line)
    match shlex.split(line, comments=True):
        case ["python", "-m", module, *arguments]:
            exit_code = call(module.removeprefix("services."), *arguments).returncode
        case _:
            exit_code = subprocess.run(["sh", "-ec", line], cwd=place, check=False).returncode
    return exit_code == (int(said[1]) if said else 0)


def test_inline_workers_and_one_worker_give_the_bits_of_ray(root: Path, options: tuple[str, ...], call: Call) -> None:
    """A second root with the same corpus and cache makes the run start from step 0."""
    other = root.with_name("other")
    other.mkdir()
    for kind in ("corpus", "compile_cache"):
        (other / kind).symlink_to(root / kind)
    alone = ("--launch", "inline", "--parallel.data_parallel_size=1", "--compile.require_warm=true")
    done = call("trainer", *options[:2], "--root", str(other), *alone)
    assert done.returncode == 0, done.stderr
    assert state_hash(checkpoints(other)["step-00000060"]) == state_hash(checkpoints(root)["step-00000060"])


def test_a_cache_of_another_program_is_refused_and_both_sides_are_shown(
    root: Path, options: tuple[str, ...], call: Call
) -> None:
    (cache,) = root.glob("compile_cache/cpu/*/")
    refused = call("trainer", *options, f"--cache={cache}", "--batch.micro_batch_size=2")
    assert refused.returncode == 3
    assert "recipe.batch.micro_batch_size: cache 4, this run 2" in refused.stderr
    assert "--allow-cold-compile" in refused.stderr


def test_a_cache_of_another_instruction_set_is_refused(root: Path, options: tuple[str, ...]) -> None:
    refused = run("trainer", *options, "--train.seed=1", ATEN_CPU_CAPABILITY="default")
    assert refused.returncode == 3
    assert "cpu_capability" in refused.stdout


def test_a_cold_graph_stops_a_run_that_requires_a_warm_cache(root: Path, options: tuple[str, ...], call: Call) -> None:
    cold = ("--batch.micro_batch_size=2", "--allow-cold-compile", "--compile.require_warm=true")
    stopped = call("trainer", *options, *cold, "--launch", "inline", "--parallel.data_parallel_size=1")
    assert stopped.returncode == 4, stopped.stderr
    assert "compile.require_warm" in stopped.stderr
    assert len(list(root.glob("checkpoint/*"))) == 1


def test_a_cache_serves_each_value_of_the_optimizer(place: Path, options: tuple[str, ...], call: Call) -> None:
    values = ("weight_decay=0.3", "beta1=0.8", "beta2=0.9", "epsilon=1e-6", "max_grad_norm=0.5", "learning_rate=0.002")
    changed = (*(f"--optimizer.{each}" for each in values), "--train.max_steps=2", "--compile.require_warm=true")
    one = ("--root", str(place / "fsx"), "--launch=inline", "--parallel.data_parallel_size=1")
    done = call("trainer", *options[:2], *one, *changed)
    assert done.returncode == 0, done.stderr


def test_a_flipped_byte_in_the_cache_is_found_before_a_worker_starts(
    root: Path, options: tuple[str, ...], call: Call
) -> None:
    (cache,) = root.glob("compile_cache/cpu/*/")
    binary = next(path for path in sorted(cache.rglob("*.so")))
    flip_a_bit(binary)
    refused = call("trainer", *options, "--train.seed=2")
    flip_a_bit(binary)
    assert refused.returncode == 3
    assert binary.name in refused.stderr
