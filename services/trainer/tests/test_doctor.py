"""`doctor`: what is wrong shows in its table, with the next command and the exit code of its kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.store import LOCK_SUFFIX, Artifact, Draft, publish_once
from services.common.process.entry_point import exit_code_of
from services.common.program.fingerprint import program_facts
from services.common.recipe.schema import fingerprint
from services.common.testing import artifacts
from services.common.testing.disks import mounted, remount
from services.common.testing.gpus import H200, install_gpus
from services.trainer.__main__ import main
from services.trainer.inspection.doctor import compare_nodes
from services.trainer.inspection.findings import Finding, Result, merge_nodes, ok, warning
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import REPOSITORY, call_trainer, checkpoints, flip_a_bit

EAGER = ("--compile.enabled=false", "--parallel.data_parallel_size=1")
COMPILED = ("--compile.enabled=true", "--parallel.data_parallel_size=1")

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a root where a run of 20 steps was stopped after 10."""
    folder = tmp_path_factory.mktemp("trained")
    recipe, root = write_recipe(folder), folder / "fsx"
    make_corpus(root, make_recipe(folder))
    options = [*EAGER, "--launch=inline", "--train.max_steps=10"]
    assert exit_code_of(lambda: main(["--recipe", str(recipe), "--root", str(root), *options])) == 0
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def doctor(place: Path, capfd: pytest.CaptureFixture[str]) -> Doctor:
    def call(*options: str, root: Path = place / "fsx") -> tuple[int, str]:
        return call_trainer(capfd, place / "small.toml", root, *(options or EAGER), command="doctor")

    return call


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("corpus/*/*/train/shard-*.arrow"))


def everything_below(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_can_go_on_has_no_problem_and_nothing_is_left_behind(place: Path, doctor: Doctor) -> None:
    before = everything_below(place / "fsx")

    exit_code, output = doctor()

    assert exit_code == 0, output
    assert "step 10 of 20" in output
    assert "  problem  " not in output
    assert everything_below(place / "fsx") == before


def test_a_flipped_bit_in_a_shard_is_named_with_the_command_that_makes_the_corpus(place: Path, doctor: Doctor) -> None:
    root = place / "fsx"
    flip_a_bit(next(root.glob("corpus/*/*/train/shard-000001.arrow")))

    exit_code, output = doctor()

    assert exit_code == 3
    assert "shard-000001.arrow" in output
    (corpus,) = (root / "corpus").glob("*/*[0-9a-f]")
    away = f"mv {corpus} {root / f'damaged-{corpus.name}'}"
    assert f"next: {away} && python -m services.tokenizer --recipe {place / 'small.toml'} --root {root}" in output
    assert doctor("--quick", *EAGER)[0] == 0  # sizes alone do not show it


def test_without_anything_each_missing_artifact_has_its_command(tmp_path: Path, doctor: Doctor) -> None:
    root = tmp_path / "none" / "yet"

    exit_code, output = doctor(*COMPILED, "--quick", root=root)

    assert exit_code == 3
    for stage in ("tokenizer", "compiler"):
        assert f"next: python -m services.{stage} --recipe" in output
    assert not root.exists()


def publish_cache(place: Path, **facts: str) -> Artifact[CompileCacheManifest]:
    """Publish a compile cache of this program with other `facts`."""
    recipe = make_recipe(place, compile__enabled="true", parallel__data_parallel_size="1")
    held = {**program_facts(recipe), **facts}
    program = {"facts": held, "program_fingerprint": fingerprint(held)}
    address = compile_cache_address(place / "fsx", recipe, fingerprint(held))
    build = lambda workspace: Draft(artifacts.fill(workspace).payload.model_copy(update=program))  # noqa: E731
    return publish_once(address, CompileCacheManifest, "compiler", recipe, build)[0]


def test_a_compile_cache_is_held_against_its_checksums_and_this_program(place: Path, doctor: Doctor) -> None:
    cache = publish_cache(place)
    flip_a_bit(cache.path / "graphs/two.bin")
    exit_code, output = doctor(*COMPILED)
    assert exit_code == 3
    assert "graphs/two.bin" in output
    assert f"next: mv {cache.path} {place / 'fsx'}/damaged-{cache.path.name} && python -m services.compiler" in output

    shutil.rmtree(cache.path)
    publish_cache(place, torch="0.1")
    exit_code, output = doctor(*COMPILED, "--quick")
    assert exit_code == 3
    assert "'0.1'" in output
    assert "next: python -m services.compiler" in output


def test_what_a_run_has_lost_and_what_holds_it_is_named(place: Path, doctor: Doctor) -> None:
    """A damaged checkpoint, a stop file and another command's lock are warnings, but not if no checkpoint is left."""
    newest, older = (checkpoints(place / "fsx")[f"step-{step:08d}"] for step in (10, 5))
    (run,) = (place / "fsx" / "run").iterdir()
    flip_a_bit(newest / "shard-00000.safetensors")
    (run / "stop").touch()
    with hold_lock(run.with_name(run.name + LOCK_SUFFIX)):
        exit_code, output = doctor()
    assert exit_code == 0, output
    for named in (str(newest), "step 5 of 20", f"next: rm {run / 'stop'}"):
        assert named in output

    (older / "shard-00000.safetensors").unlink()
    exit_code, output = doctor()
    assert exit_code == 3
    assert "next: restore it" in output


def test_a_full_disk_and_a_read_only_one_end_with_5(place: Path, tmp_path: Path, doctor: Doctor) -> None:
    with mounted(tmp_path / "disk", "2m") as disk:
        shutil.copytree(place / "fsx" / "corpus", disk / "corpus")
        (disk / "filler").write_bytes(b"\0" * shutil.disk_usage(disk).free)
        exit_code, output = doctor(*EAGER, "--quick", root=disk)
        assert (exit_code, "next: free some space" in output) == (5, True), output

        remount(disk, "ro")
        exit_code, output = doctor(*EAGER, "--quick", root=disk)
        assert (exit_code, "Traceback" in output) == (5, False), output


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        (["--parallel.threads_per_worker=2"], 3, "next: train with --allow-changed-program"),
        (["--parallel.threads_per_worker=1000", "--train.seed=1"], 0, "next: --parallel.threads_per_worker="),
        ([f"--batch.micro_batch_size={2**28}", f"--batch.global_batch_size={2**28}"], 4, "micro_batch_size"),
        (["--parallel.data_parallel_size=2", "--parallel.device=cuda"], 4, "1 too few"),
    ],
    ids=["another program", "too many threads", "too little memory", "too few GPUs"],
)
def test_a_recipe_that_the_run_or_its_node_does_not_fit(
    options: list[str], code: int, shown: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200])

    exit_code, output = doctor(*EAGER, "--quick", *options)

    assert exit_code == code, output
    assert shown in output


@pytest.mark.slow
def test_under_ray_a_task_of_each_node_looks_at_it(place: Path) -> None:
    options = ["--recipe", str(place / "small.toml"), "--root", str(place / "fsx"), *EAGER, "--launch=ray"]
    command = [sys.executable, "-m", "services.trainer", "doctor", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "GFLOP/s in float32" in done.stdout


def test_nodes_that_agree_are_one_line_and_others_are_named() -> None:
    def node(program: str, flops: float, speed: Finding) -> list[Finding]:
        device, products = replace(ok(""), compared=program), replace(ok(""), compared=flops)
        of_check = {"device": device, "matrix products": products, "disk speed": speed}
        return [replace(finding, check=check) for check, finding in of_check.items()]

    found = {name: node("one", 1e12, ok("fsync 1 ms")) for name in ("a", "b", "c")}
    found["d"] = node("two", 8e11, warning("fsync 900 ms", "find what else writes there"))

    merged = [(each.check, each.result, each.seen.startswith("d: ")) for each in merge_nodes(found)]
    assert merged == [
        ("device", Result.OK, False),
        ("matrix products", Result.OK, False),
        ("disk speed", Result.OK, False),
        ("disk speed", Result.WARNING, True),
    ]
    compared = list(compare_nodes(found))
    assert [(each.check, each.exit_code) for each in compared] == [("programs", 4), ("stragglers", 0)]
    assert all("d" in finding.seen for finding in compared)
