"""`doctor`: what is wrong shows in its table, with the next command and the exit code of its kind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.store import LOCK_SUFFIX, Artifact, Draft, publish_once
from services.common.process import limits
from services.common.process.entry_point import exit_code_of
from services.common.program.fingerprint import program_facts
from services.common.recipe.schema import fingerprint
from services.common.testing import artifacts
from services.common.testing.disks import mounted, remount
from services.common.testing.gpus import H200, install_gpus
from services.common.testing.waiting import wait_until
from services.trainer.__main__ import main
from services.trainer.inspection.file_system import PROBE_PREFIX, probe_folder
from services.trainer.inspection.findings import Finding, Result, format_table, merge_nodes, ok
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
    assert "from step 10 of 20" in output
    assert re.search("1 starts of the workers, .* 1 ", output)
    assert "  problem  " not in output
    assert "GFLOP/s in float32 with 1 threads" in output
    assert everything_below(place / "fsx") == before


def test_a_flipped_bit_in_a_shard_is_named_with_what_makes_the_corpus_anew(place: Path, doctor: Doctor) -> None:
    flip_a_bit(shards(place / "fsx")[1])

    exit_code, output = doctor()

    assert exit_code == 3
    assert "shard-000001.arrow: xxh3-128 is" in output
    root, (corpus,) = place / "fsx", (place / "fsx/corpus").glob("*/*[0-9a-f]")
    away = f"mv {corpus} {root / f'damaged-{corpus.name}'}"
    assert f"next: {away} && python -m services.tokenizer --recipe {place / 'small.toml'} --root {root}" in output
    assert "from step 10 of 20" in output
    assert doctor("--quick", *EAGER)[0] == 0  # sizes alone do not show it


def test_without_anything_each_missing_artifact_has_its_command(tmp_path: Path, doctor: Doctor) -> None:
    root = tmp_path / "none" / "yet"

    exit_code, output = doctor(*COMPILED, root=root)

    assert exit_code == 3
    assert f"{root} does not exist" in output
    for stage in ("tokenizer", "compiler"):
        assert output.count(f"python -m services.{stage} --recipe") == 1
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
    exit_code, output = doctor(*COMPILED)
    assert exit_code == 0, output
    assert f"{cache.path}: checksums of 3 files" in output

    flip_a_bit(cache.path / "graphs/two.bin")
    exit_code, output = doctor(*COMPILED)
    assert exit_code == 3
    assert "graphs/two.bin: xxh3-128 is" in output
    assert f"next: mv {cache.path} {place / 'fsx'}/damaged-{cache.path.name} && python -m services.compiler" in output

    shutil.rmtree(cache.path)
    publish_cache(place, torch="0.1")
    exit_code, output = doctor(*COMPILED)
    assert exit_code == 3
    assert "torch: cache '0.1', this run '" in output
    assert "next: python -m services.compiler" in output


def test_damaged_checkpoints_are_named_and_the_step_that_the_run_goes_on_from(place: Path, doctor: Doctor) -> None:
    newest, older = (checkpoints(place / "fsx")[f"step-{step:08d}"] for step in (10, 5))
    flip_a_bit(newest / "shard-00000.safetensors")
    exit_code, output = doctor()
    assert exit_code == 0, output
    assert f"{newest}: 1 of 2 files are damaged" in output
    assert "1 of " in output
    assert "from step 5 of 20" in output

    (older / "shard-00000.safetensors").unlink()
    exit_code, output = doctor()
    assert exit_code == 3
    assert "2 checkpoints" in output
    assert "next: restore it" in output


def test_a_checkpoint_of_another_program_is_told_before_the_run_is_refused(place: Path, doctor: Doctor) -> None:
    exit_code, output = doctor(*EAGER, "--parallel.threads_per_worker=2")

    assert exit_code == 3
    assert "parallel.threads_per_worker was 1 and is 2" in output
    assert "next: train with --allow-changed-program" in output


def test_another_commands_lock_and_a_stop_file_are_warned_of(place: Path, doctor: Doctor) -> None:
    (run,) = (place / "fsx" / "run").iterdir()
    (run / "stop").touch()
    with hold_lock(run.with_name(run.name + LOCK_SUFFIX)):
        exit_code, output = doctor()

    assert exit_code == 0, output
    assert f"process {os.getpid()} on" in output
    assert f"next: wait for it, or stop it: touch {run / 'stop'}" in output
    assert f"next: rm -r {run / 'stop'}" in output


def test_a_full_disk_and_a_read_only_one_end_with_5(place: Path, tmp_path: Path, doctor: Doctor) -> None:
    with mounted(tmp_path / "disk", "2m") as disk:
        shutil.copytree(place / "fsx" / "corpus", disk / "corpus")
        exit_code, output = doctor(*EAGER, "--model.intermediate_size=4096", root=disk)
        assert exit_code == 5
        assert "warning  tmpfs at" in output
        assert "next: free some space, or pass a --root with more" in output

        (disk / "filler").write_bytes(b"\0" * shutil.disk_usage(disk).free)
        exit_code, output = doctor(root=disk)
        assert exit_code == 5
        assert "No space left on device" in output

        remount(disk, "ro")
        exit_code, output = doctor(root=disk)
        assert exit_code == 5
        assert "Read-only file system" in output
        assert "Traceback" not in output
        assert "next: pass a --root that this user can write to" in output


@pytest.mark.parametrize(("launch", "home"), [("inline", None), ("ray", "/proc")])
def test_a_user_whom_the_system_does_not_know_gets_the_same_table(place: Path, launch: str, home: str | None) -> None:
    """As under `docker run --user 61234`, with a home that is unset or cannot be written to."""
    unshare = ["unshare", "--map-user=61234", "--map-group=61234"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs `unshare --map-user`, to run as a user without a name")
    (run,) = (place / "fsx/run").glob("*/")
    run.chmod(0o555)
    names = ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME")
    environment = {name: value for name, value in os.environ.items() if name not in names}

    options = ["--recipe", str(place / "small.toml"), "--root", str(place / "fsx"), f"--launch={launch}", *EAGER]
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "services.trainer", "doctor", *options],
        cwd=REPOSITORY,
        env={**environment, **({"HOME": home} if home else {})},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 5, done.stdout + done.stderr
    assert done.stdout.count("  problem  ") == 1
    assert "61234" in done.stdout
    assert "Traceback" not in done.stderr


def test_too_many_threads_are_warned_of_and_a_worker_without_memory_ends_with_4(doctor: Doctor) -> None:
    exit_code, output = doctor(*EAGER, "--parallel.threads_per_worker=1000", "--train.seed=1")
    assert exit_code == 0, output
    assert "1 workers of 1000 threads take 1000" in output
    assert "next: --parallel.threads_per_worker=" in output

    huge = 2**28
    exit_code, output = doctor(*EAGER, f"--batch.micro_batch_size={huge}", f"--batch.global_batch_size={huge}")
    assert exit_code == 4
    assert "next: lower batch.micro_batch_size" in output


def test_too_few_gpus_for_the_workers_of_a_node_end_with_4(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200])

    exit_code, output = doctor("--compile.enabled=false", "--parallel.data_parallel_size=2", "--parallel.device=cuda")

    assert exit_code == 4
    assert re.search(
        r"GPUs +problem +1 x NVIDIA H200 .*; 2 workers take one each, so 1 of them would have none", output
    )


@pytest.mark.slow
def test_a_node_whose_limit_on_maps_is_below_the_corpus_ends_with_4(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " maps (vm.max_map_count), a worker may need 8," in doctor("--quick", *EAGER)[1]

    (tmp_path / "max_map_count").write_text("4096\n", encoding="ascii")
    monkeypatch.setattr(limits, "_MAX_MAPS", tmp_path / "max_map_count")
    exit_code, printed = doctor("--quick", *EAGER)

    assert exit_code == 4
    assert "next: sysctl -w vm.max_map_count=16384" in printed


@pytest.mark.slow
def test_under_ray_a_task_of_each_node_looks_at_it(place: Path) -> None:
    options = ["--recipe", str(place / "small.toml"), "--root", str(place / "fsx"), *EAGER, "--launch=ray"]
    command = [sys.executable, "-m", "services.trainer", "doctor", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "GFLOP/s in float32 with 1 threads" in done.stdout
    assert "clocks" in done.stdout


def test_what_a_killed_doctor_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = """
import sys, time
from pathlib import Path
from services.common.process.entry_point import exit_code_of
from services.trainer.inspection.file_system import probe_folder
with probe_folder(Path(sys.argv[1])):
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", left, str(tmp_path)], cwd=REPOSITORY)
    wait_until(lambda: list(tmp_path.glob(f"{PROBE_PREFIX}????????")), 60)
    with probe_folder(tmp_path):
        assert len(list(tmp_path.glob(f"{PROBE_PREFIX}????????"))) == 2  # it lives, so its folder is its own
    process.send_signal(signal.SIGKILL)
    process.wait()

    with probe_folder(tmp_path) as own:
        assert list(tmp_path.glob(f"{PROBE_PREFIX}????????")) == [own]
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_agree_are_one_line_and_others_are_named() -> None:
    slow = Finding("disk speed", Result.WARNING, "fsync 900 ms", "see what else writes there")
    found = {"a": [ok("memory", "8 GiB"), ok("disk speed", "fsync 1 ms")], "b": [ok("memory", "8 GiB"), slow]}

    lines = format_table(merge_nodes(found), width=60).splitlines()

    assert [line.split() for line in lines] == [
        ["check", "result", "seen"],
        ["memory", "ok", "2", "nodes,", "the", "first:", "8", "GiB"],
        ["disk", "speed", "ok", "1", "nodes,", "the", "first:", "fsync", "1", "ms"],
        ["disk", "speed", "warning", "b:", "fsync", "900", "ms"],
        ["next:", "see", "what", "else", "writes", "there"],
    ]
