"""The trainer's command: kills, signals, workers, and bad input, each with its exit code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.artifacts.checkpoint import shard_name
from services.common.artifacts.manifest import MANIFEST, read_sealed
from services.common.errors import shell_command
from services.common.process.entry_point import exit_code_of
from services.common.testing.disks import mounted, remount
from services.common.testing.file_opens import noticing_opens
from services.common.testing.waiting import wait_until
from services.trainer.__main__ import main
from services.trainer.runs.status import RunStatus, read_status
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import (
    call_trainer,
    checkpoints,
    flip_a_bit,
    read_run,
    start_trainer,
    state_hash,
    train_alone,
    workers_of,
)

# Steps of a tenth of a second, so that a signal arrives in the middle of a run. More micro-batches, same model.
SLOW = ("--batch.global_batch_size=64", "--checkpoint.interval_steps=7")

Outcome = tuple[str, list[float], list[float]]
"""Final state, losses and validation losses."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the recipe's corpus."""
    make_corpus(tmp_path / "fsx", make_recipe(tmp_path))
    return tmp_path / "fsx"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """20 slow steps by one worker, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    make_corpus(folder / "fsx", make_recipe(folder))
    options = ("--recipe", str(write_recipe(folder)), "--root", str(folder / "fsx"), "--launch=inline", *SLOW)
    assert exit_code_of(lambda: main([*options, "--parallel.data_parallel_size=1"])) == 0
    return outcome(folder / "fsx")


def status_of(root: Path) -> RunStatus:
    [folder] = root.glob("run/*/")
    return read_status(root, folder.name)


def outcome(root: Path) -> Outcome:
    run = read_run(root)
    return state_hash(checkpoints(root)["step-00000020"]), run.losses, run.validation_losses


def test_resume_after_kill_gives_identical_losses_and_weights(
    recipe: Path, root: Path, straight: Outcome, capfd: pytest.CaptureFixture[str]
) -> None:
    """A killed command leaves no process. A lost machine, which kills all of them at once, is `test_kills`'."""
    process = start_trainer(recipe, root, *SLOW)
    wait_until(lambda: "step-00000007" in checkpoints(root), 120, process=process)
    assert status_of(root).state == "running"
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.kill()
    process.communicate()
    wait_until(lambda: not any(each.is_running() for each in started))
    assert "step-00000020" not in checkpoints(root)
    assert (status_of(root).state, status_of(root).exit_code) == ("lost", None)

    exit_code, output = call_trainer(capfd, recipe, root, "--launch=inline", *SLOW)

    assert exit_code == 0, output
    assert outcome(root) == straight
    assert (status_of(root).state, status_of(root).exit_code, status_of(root).step) == ("done", 0, 20)


def test_a_killed_worker_is_replaced_and_the_number_of_workers_may_change(
    recipe: Path, root: Path, straight: Outcome, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two workers that share the optimizer's state, one killed, the group started again, stopped by SIGTERM, and
    finished by four that each hold all of it.
    """
    process = start_trainer(recipe, root, *SLOW, "--parallel.zero_stage=1")
    wait_until(lambda: "step-00000007" in checkpoints(root), 120, process=process)
    workers_of(process)[1].kill()
    wait_until(lambda: len(read_run(root).starts) == 2, 120, process=process)
    reached = read_run(root).records[-1]["step"]
    # A signal before the next step saves none.
    wait_until(lambda: read_run(root).records[-1]["step"] > reached, 120, process=process)
    stop(process, root, signal.SIGTERM, exit_code=75)
    assert len(read_run(root).starts) == 2

    exit_code, output = call_trainer(capfd, recipe, root, "--launch=inline", *SLOW, "--parallel.data_parallel_size=4")
    assert exit_code == 0, output
    assert outcome(root) == straight


def test_ctrl_c_commits_a_checkpoint(recipe: Path, root: Path) -> None:
    process = start_trainer(recipe, root, *SLOW, "--checkpoint.interval_steps=20")
    wait_until(lambda: read_run(root).records, 120, process=process)
    stop(process, root, signal.SIGINT, exit_code=130)
    assert len(checkpoints(root)) == len(read_run(root).starts) == 1


def stop(process: subprocess.Popen[str], root: Path, number: signal.Signals, exit_code: int) -> None:
    """Signal the command and its process group, as a terminal or `timeout` does. The last recorded step must be
    committed.
    """
    os.killpg(process.pid, number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == exit_code, output
    assert "Traceback" not in output
    assert (status_of(root).state, status_of(root).exit_code) == ("stopped", exit_code)
    last_step = read_run(root).records[-1]["step"]
    assert list(checkpoints(root))[-1] == f"step-{last_step:08d}"


def test_sigterm_while_the_workers_import_ends_the_command_at_once(tmp_path: Path, recipe: Path, root: Path) -> None:
    process = start_trainer(recipe, root, *SLOW)
    wait_until(lambda: list(tmp_path.glob("millrace-workers-*/*")), 120, process=process)  # where they will meet
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert started
    _, alive = psutil.wait_procs(started, timeout=60)  # the kernel kills them after the command has ended
    assert not alive
    assert list(tmp_path.glob("millrace-*")) == []


def test_a_run_goes_on_under_another_program_only_when_told_and_remembers_it(
    recipe: Path, root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_alone(capfd, recipe, root, "--train.max_steps=2")[0] == 0

    for name, before, now in (("threads_per_worker", 1, 2), ("tensor_parallel_size", 1, 2), ("zero_stage", 0, 3)):
        exit_code, output = call_trainer(capfd, recipe, root, f"--parallel.{name}={now}")
        assert (exit_code, f"parallel.{name} was {before} and is {now}" in output) == (3, True), output

    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")  # other bits from the same source
    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=4")
    assert (exit_code, "--allow-changed-program" in output) == (3, True), output
    assert list(checkpoints(root)) == ["step-00000002"]

    for steps, flags in ((4, ["--allow-changed-program"]), (6, [])):
        exit_code, output = train_alone(capfd, recipe, root, f"--train.max_steps={steps}", *flags)
        assert exit_code == 0, output
        newest = checkpoints(root)[f"step-{steps:08d}"]
        assert read_sealed(newest)["checkpoint"]["waivers"] == ["--allow-changed-program"]


def test_training_leaves_a_trail_and_ends_with_the_loss_the_report_and_the_next_command(
    recipe: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=4", "--train.evaluation_interval_steps=2")
    assert exit_code == 0, output
    [folder] = root.glob("run/*/")
    expected = [
        (f"{each['step']}", f"{each['loss']:.3f}", f"{each['bits_per_byte']:.3f}", f"{each['step'] * 8 * 16:,}")
        for each in read_run(root).evaluations
    ]
    assert [each[0] for each in expected] == ["0", "2", "4"]
    line = r" trainer.* I step (\d+): validation loss ([\d.]+), ([\d.]+) bits per byte, ([\d,]+) tokens, \d+"
    for text in (output, (folder / "logs/rank-00000.log").read_text()):
        assert re.findall(line, text) == expected

    end = dict(re.findall(r"^  (loss|report|next) +(.*)$", output, re.MULTILINE))
    assert expected[-1][1] in end["loss"]
    assert f"{read_run(root).losses[-1]:.3f}" in end["loss"]
    assert Path(end["report"]).is_file()
    start = shell_command("services.trainer", "sample")
    assert end["next"].startswith(start)
    assert main(["sample", *shlex.split(end["next"].removeprefix(start))]) == 0


def test_a_second_command_finds_the_run_complete_and_sees_to_its_report(
    recipe: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--train.max_steps=2",)
    assert train_alone(capfd, recipe, root, *options)[0] == 0
    (report,) = root.glob("run/*/report.html")
    written = report.stat().st_mtime_ns
    newest = checkpoints(root)["step-00000002"]
    for left in ("step-00000001.removed-01234567.partial", "step-00000002.01234567.partial"):  # as if killed
        (newest.parent / left).mkdir()
        (newest.parent / left / shard_name(0)).touch()
    with noticing_opens(newest) as opens:
        assert call_trainer(capfd, recipe, root, *options)[0] == 0
    assert {path.name for path in opens.paths} == {MANIFEST}
    assert sorted(path.name for path in newest.parent.iterdir()) == sorted(checkpoints(root))
    assert report.stat().st_mtime_ns == written

    # As if it was that of a shorter run, which was made longer and killed before the report of its last part.
    os.utime(report, ns=(0, 0))
    assert call_trainer(capfd, recipe, root, *options)[0] == 0
    assert report.stat().st_mtime_ns > written


def test_a_damaged_newest_checkpoint_is_named_and_others_can_be_inspected(
    recipe: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--train.max_steps=2", "--checkpoint.interval_steps=1")
    assert train_alone(capfd, recipe, root, *options)[0] == 0
    flip_a_bit(checkpoints(root)["step-00000002"] / shard_name(0))

    for step, exit_code, found in ((["--step=1"], 0, "step 1"), (["--step=2"], 3, shard_name(0)), ([], 0, "step 1")):
        code, printed = call_trainer(capfd, recipe, root, *step, command="inspect-checkpoint")
        assert (code, found in printed) == (exit_code, True), printed


def test_training_succeeds_without_its_views_which_a_moved_root_has_too(
    recipe: Path, root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page and the sample are made by other commands then; training loads no model for them."""

    def out_of_memory(run: object) -> None:
        raise MemoryError

    with monkeypatch.context() as small_machine:
        small_machine.setattr("services.trainer.inspection.sample.TextGenerator", out_of_memory)
        small_machine.setattr("services.trainer.report.run_report.list_facts", out_of_memory)
        exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=2")
        assert exit_code == 0, output
        assert not list(root.glob("run/*/report.html"))

    root = root.rename(root.with_name("elsewhere"))
    for options, is_sampled in (((), False), (("--sample",), True)):
        assert call_trainer(capfd, recipe, root, *options, command="report")[0] == 0
        (page,) = root.glob("run/*/report.html")
        assert ("If the" in page.read_text(encoding="utf-8")) is is_sampled
    exit_code, output = call_trainer(capfd, recipe, root, command="summary")
    assert (exit_code, str(root / "corpus") in output, "> If the" in output) == (0, True, True), output


TOKENIZE, COMPILE = shell_command("services.tokenizer", "tokenize"), shell_command("services.compiler", "compile")


def publish(root: Path, **settings: Any) -> Path:
    return make_corpus(root, make_recipe(root.parent), **settings).path


@pytest.mark.parametrize(
    ("prepare", "options", "code", "named"),
    [
        (lambda root: None, (), 3, TOKENIZE),
        (lambda root: publish(root, rows=0), (), 3, TOKENIZE),
        (publish, ("--compile.enabled=true", "--batch.micro_batch_size=2"), 3, COMPILE),
        (publish, ("--corpus={corpus}", "--model.vocab_size=400", "--tokenizer.train.vocab_size=400"), 3, "400"),
        (lambda root: (publish(root) / MANIFEST).unlink(), ("--corpus={corpus}",), 3, "corpus"),
        (publish, ("--train.max_stepz=3",), 2, "train.max_steps"),
        (publish, ("--corpus={corpus}", "--root={recipe}/fsx"), 5, "--root"),
    ],
    ids=["no corpus", "no sample", "no cache", "other vocabulary", "unpublished", "unknown key", "root in a file"],
)
def test_a_command_that_cannot_train_names_what_is_wrong_and_the_next_command(
    tmp_path: Path,
    recipe: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Path], object],
    options: tuple[str, ...],
    code: int,
    named: str,
) -> None:
    """The next command has the overrides of the failed one: without them the same error would follow."""
    prepare(tmp_path / "fsx")
    corpus = next((tmp_path / "fsx/corpus").glob("*/*[0-9a-f]"), None)
    options = tuple(option.format(corpus=corpus, recipe=recipe) for option in options)
    monkeypatch.setattr(sys, "argv", ["trainer", *options])

    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx", *options)

    assert (exit_code, named in output) == (code, True), output
    for command in re.findall(rf"`((?:{TOKENIZE}|{COMPILE}).*?)`", output):
        assert {word for word in options if "." in word} <= set(shlex.split(command))


def test_a_full_disk_keeps_the_committed_checkpoints_and_the_run_goes_on_after_room_is_made(
    recipe: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk has room for no more than two checkpoints of 0.2 MB beside the run."""
    [corpus] = root.glob("corpus/*/*/")
    options = (f"--corpus={corpus}", "--train.max_steps=4", "--checkpoint.interval_steps=1")
    with mounted(root.with_name("disk"), "600k") as disk:
        exit_code, output = train_alone(capfd, recipe, disk, *options, "--checkpoint.keep_latest=10")
        assert exit_code == 5, output
        assert (status_of(disk).state, status_of(disk).exit_code) == ("failed", 5)
        committed = checkpoints(disk)
        assert committed
        assert [read_sealed(path)["id"] for path in committed.values()] == list(committed)

        remount(disk, "size=20m")
        exit_code, output = train_alone(capfd, recipe, disk, *options)
        assert exit_code == 0, output
