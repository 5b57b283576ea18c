"""`doctor`: what is wrong shows in its table, with the next command and the exit code of its kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.store import LOCK_SUFFIX, Artifact, Draft, publish_once
from services.common.artifacts.upstream import stage_command
from services.common.errors import shell_command
from services.common.hardware import image_platform
from services.common.process.entry_point import exit_code_of
from services.common.program.fingerprint import program_facts
from services.common.recipe.schema import Stage, fingerprint
from services.common.testing import artifacts
from services.common.testing.disks import mounted, remount
from services.common.testing.gpus import H200, install_gpus
from services.trainer.__main__ import main
from services.trainer.inspection.doctor import compare_nodes
from services.trainer.inspection.findings import Finding, Result, merge_nodes, ok, warning
from services.trainer.inspection.node import check_gpus, check_neuron_cores
from services.trainer.metrics.recorder import published_peak
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import call_trainer, checkpoints, file_states, flip_a_bit
from services.trainer.workers.start import describe_workers

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


def test_a_run_that_can_go_on_has_no_problem_and_nothing_is_left_behind(place: Path, doctor: Doctor) -> None:
    before = file_states(place / "fsx")

    exit_code, output = doctor()

    assert exit_code == 0, output
    assert "step 10 of 20" in output
    assert "  problem  " not in output
    assert file_states(place / "fsx") == before


def test_without_anything_each_missing_artifact_has_its_command(place: Path, doctor: Doctor) -> None:
    root = place / "none" / "yet"

    exit_code, output = doctor(*COMPILED, "--quick", root=root)

    assert exit_code == 3
    assert f"next: {stage_command('tokenizer', place / 'small.toml', root)}" in output
    assert f"next: {stage_command('compiler', place / 'small.toml', root)}" in output
    assert not root.exists()


def publish_cache(place: Path, **facts: str) -> Artifact[CompileCacheManifest]:
    """Publish a compile cache of this program with other `facts`."""
    recipe = make_recipe(place, compile__enabled="true", parallel__data_parallel_size="1")
    held = {**program_facts(recipe), **facts}
    program = {"facts": held, "program_fingerprint": fingerprint(held)}
    address = compile_cache_address(place / "fsx", recipe, fingerprint(held))
    build = lambda workspace: Draft(artifacts.fill(workspace).payload.model_copy(update=program))  # noqa: E731
    return publish_once(address, CompileCacheManifest, "compiler", recipe, build)[0]


@pytest.mark.parametrize(
    ("file", "stage", "options"),
    [
        ("corpus/*/*/train/shard-000001.arrow", "tokenizer", EAGER),
        ("compile_cache/*/*/graphs/two.bin", "compiler", COMPILED),
    ],
)
def test_a_flipped_bit_is_named_with_the_command_that_makes_the_artifact(
    place: Path, doctor: Doctor, file: str, stage: Stage, options: tuple[str, ...]
) -> None:
    root, cache = place / "fsx", publish_cache(place)
    (path,) = root.glob(file)
    flip_a_bit(path)

    exit_code, output = doctor(*options)

    assert (exit_code, path.name in output) == (3, True), output
    damaged = cache.path if stage == "compiler" else path.parents[1]
    away = f"mv {damaged} {root / f'damaged-{damaged.name}'}"
    assert f"next: {away} && {stage_command(stage, place / 'small.toml', root)}" in output
    assert doctor("--quick", *EAGER)[0] == 0  # sizes alone do not show it


def test_a_compile_cache_of_another_program_is_named(place: Path, doctor: Doctor) -> None:
    publish_cache(place, torch="0.1")

    exit_code, output = doctor(*COMPILED, "--quick")

    assert exit_code == 3
    assert "'0.1'" in output
    assert f"next: {shell_command('services.compiler', 'compile')}" in output


def test_a_recipe_of_another_name_has_the_cache_of_its_program(place: Path, doctor: Doctor) -> None:
    cache, recipe = publish_cache(place), place / "small.toml"
    recipe.write_text(recipe.read_text().replace('name = "small"', 'name = "renamed"'))

    exit_code, output = doctor(*COMPILED, "--quick")

    assert (exit_code, str(cache.path) in output) == (0, True), output


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
        (["--parallel.data_parallel_size=2", "--parallel.device=cuda"], 4, "2 too few"),
    ],
    ids=["another program", "too many threads", "too little memory", "too few GPUs"],
)
def test_a_recipe_that_the_run_or_its_node_does_not_fit(
    options: list[str], code: int, shown: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_gpus(monkeypatch, tmp_path / "bin", [H200])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    exit_code, output = doctor(*EAGER, "--quick", *options)

    assert exit_code == code, output
    assert shown in output


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


OK, WARNING, PROBLEM = Result.OK, Result.WARNING, Result.PROBLEM


@pytest.mark.parametrize(
    ("free", "size", "workers", "result"),
    [
        ([140, 140], 141, 2, OK),
        ([140], 141, 2, PROBLEM),
        ([], 141, 1, PROBLEM),
        ([140], 0, 1, PROBLEM),
        ([20], 141, 1, WARNING),
        ([140, 20], 141, 1, OK),  # the only worker takes the other one
    ],
    ids=["enough", "too few", "none", "too little memory", "taken", "one is taken"],
)
def test_the_gpus_of_a_node_are_compared_with_its_workers(
    free: list[int], size: int, workers: int, result: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu] * 2**30, size * 2**30))

    assert check_gpus(make_recipe(tmp_path, parallel__device="cuda"), workers).result == result


def test_a_driver_that_is_too_old_for_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVML counts the GPUs of such a node, which CUDA then refuses."""

    def refuse(_: int) -> str:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    assert check_gpus(make_recipe(tmp_path, parallel__device="cuda"), 1).result == PROBLEM


@pytest.mark.parametrize(
    ("chips", "workers", "result", "seen"),
    [
        (16, 64, OK, "has 4, each of 2 physical"),
        (16, 128, OK, "has 8, each of 1 physical"),
        (1, 64, PROBLEM, "60 too few"),
        (0, 64, WARNING, "0 chips"),
    ],
)
def test_the_chips_of_a_node_are_compared_with_its_workers(
    chips: int, workers: int, result: Result, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    for number in range(chips):
        (tmp_path / f"neuron{number}").touch()
    sizes = ("parallel__data_parallel_size", "cluster__trainer_workers_per_node", "batch__global_batch_size")
    on_trn2 = {"parallel__device": "neuron", "train__reduction": "fast", "batch__micro_batch_size": "1"}
    instance = {"cluster__trainer_instance_type": "trn2.48xlarge", **dict.fromkeys(sizes, f"{workers}")}

    recipe = make_recipe(tmp_path, **on_trn2, **instance)
    found = check_neuron_cores(recipe, workers)

    assert (found.result, seen in found.seen) == (result, True), found
    assert describe_workers(recipe, tmp_path).logical_core_size == 128 // workers
    if chips:
        assert check_neuron_cores(make_recipe(tmp_path, **on_trn2), workers).result == OK


@pytest.mark.parametrize(
    ("device", "instance_type", "gpus", "peak"),
    [
        ("cuda", None, ["NVIDIA H200", "NVIDIA H200"], 2 * 989e12),
        ("cuda", None, ["NVIDIA H200", "NVIDIA H300"], None),
        ("neuron", "trn2.48xlarge", [""] * 64, 10672e12),
        ("neuron", None, [""], None),
        ("cpu", "trn2.48xlarge", [""], None),
    ],
)
def test_mfu_is_relative_to_the_peak_of_what_the_workers_compute_on(
    device: str, instance_type: str | None, gpus: list[str], peak: float | None, tmp_path: Path
) -> None:
    chosen = {"cluster__trainer_instance_type": instance_type} if instance_type else {}

    assert published_peak(make_recipe(tmp_path, parallel__device=device, **chosen), gpus) == peak
