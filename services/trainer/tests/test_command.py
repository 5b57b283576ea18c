"""The trainer's command: kills, signals, workers, and bad input, each with its exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.common.artifacts.checkpoint import INDEX_FILE, shard_name
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.manifest import MANIFEST, read_sealed
from services.common.artifacts.store import Artifact
from services.common.process.entry_point import exit_code_of
from services.common.testing.disks import mounted, remount
from services.common.testing.file_opens import noticing_opens
from services.common.testing.waiting import wait_until
from services.trainer.__main__ import main
from services.trainer.report.run_report import read_state
from services.trainer.runs.status import RunStatus, read_status
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import (
    call_trainer,
    checkpoints,
    flip_a_bit,
    kill_session,
    read_run,
    run_trainer,
    start_trainer,
    state_hash,
    train_alone,
    workers_of,
)

# Steps of a tenth of a second, so that a signal arrives in the middle of a run. More micro-batches, same model.
SLOW = ("--batch.global_batch_size=64", "--checkpoint.interval_steps=7")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Artifact[CorpusManifest]:
    return make_corpus(tmp_path / "fsx", make_recipe(tmp_path))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float], list[float]]:
    """Final state, losses and validation losses of 20 slow steps by one worker, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    make_corpus(folder / "fsx", make_recipe(folder))
    options = ("--recipe", str(write_recipe(folder)), "--root", str(folder / "fsx"), "--launch=inline", *SLOW)
    assert exit_code_of(lambda: main([*options, "--parallel.data_parallel_size=1"])) == 0
    return outcome(folder / "fsx")


def status_of(root: Path) -> RunStatus:
    [folder] = root.glob("run/*/")
    return read_status(root, folder.name)


def outcome(root: Path) -> tuple[str, list[float], list[float]]:
    run = read_run(root)
    return state_hash(checkpoints(root)["step-00000020"]), run.losses, run.validation_losses


def test_resume_after_kill_gives_identical_losses_and_weights(
    tmp_path: Path,
    recipe: Path,
    corpus: Artifact[CorpusManifest],
    straight: tuple[str, list[float], list[float]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "fsx"
    process = start_trainer(recipe, root, *SLOW)
    wait_until(lambda: "step-00000007" in checkpoints(root), 120, process=process)
    assert status_of(root).state == "running"
    kill_session(process)
    assert "step-00000020" not in checkpoints(root)
    assert (status_of(root).state, status_of(root).exit_code) == ("lost", None)

    exit_code, output = call_trainer(capfd, recipe, root, "--launch=inline", *SLOW)

    assert exit_code == 0, output
    assert outcome(root) == straight
    assert (status_of(root).state, status_of(root).exit_code, status_of(root).step) == ("done", 0, 20)


def test_a_killed_worker_is_replaced_and_the_number_of_workers_may_change(
    tmp_path: Path,
    recipe: Path,
    corpus: Artifact[CorpusManifest],
    straight: tuple[str, list[float], list[float]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two workers that share the optimizer's state, one killed, the group started again, stopped by SIGTERM, and
    finished by four that each hold all of it.
    """
    root = tmp_path / "fsx"
    process = start_trainer(recipe, root, *SLOW, "--parallel.zero_stage=1")
    wait_until(lambda: "step-00000007" in checkpoints(root), 120, process=process)
    workers_of(process)[1].kill()
    wait_until(lambda: len(read_run(root).starts) == 2, 120, process=process)
    reached = read_run(root).records[-1]["step"]
    # A signal before the next step saves none.
    wait_until(lambda: read_run(root).records[-1]["step"] > reached, 120, process=process)
    output = stop(process, root, signal.SIGTERM, exit_code=75)
    assert "Stopped by sigterm after step" in output
    assert len(read_run(root).starts) == 2

    exit_code, output = call_trainer(capfd, recipe, root, "--launch=inline", *SLOW, "--parallel.data_parallel_size=4")
    assert exit_code == 0, output
    assert outcome(root) == straight


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_command_and_its_workers_commits_a_checkpoint(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], number: signal.Signals, exit_code: int
) -> None:
    """SIGTERM does in the test before."""
    root = tmp_path / "fsx"
    process = start_trainer(recipe, root, *SLOW, "--checkpoint.interval_steps=20")
    wait_until(lambda: read_run(root).records, 120, process=process)
    stop(process, root, number, exit_code)
    assert len(checkpoints(root)) == len(read_run(root).starts) == 1


def stop(process: subprocess.Popen[str], root: Path, number: signal.Signals, exit_code: int) -> str:
    """Signal the command and its process group, as a terminal or `timeout` does, and return what the command printed.

    The last recorded step must be committed.
    """
    os.killpg(process.pid, number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == exit_code, output
    assert "Traceback" not in output
    assert (status_of(root).state, status_of(root).exit_code) == ("stopped", exit_code)
    last_step = read_run(root).records[-1]["step"]
    assert list(checkpoints(root))[-1] == f"step-{last_step:08d}"
    return output


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_while_the_workers_import_ends_the_command_at_once(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], number: signal.Signals, exit_code: int
) -> None:
    process = start_trainer(recipe, tmp_path / "fsx", *SLOW)
    wait_until(lambda: list(tmp_path.glob("millrace-workers-*")), 120, process=process)  # where they will meet
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == exit_code, output
    assert "before the first step" in output
    assert "Traceback" not in output
    assert "lost the workers" not in output
    assert started
    _, alive = psutil.wait_procs(started, timeout=60)  # the kernel kills them after the command has ended
    assert not alive
    assert list(tmp_path.glob("millrace-*")) == []


def test_a_command_that_is_killed_while_it_imports_leaves_no_process(tmp_path: Path, recipe: Path) -> None:
    process = start_trainer(recipe, tmp_path / "fsx")
    wait_until(psutil.Process(process.pid).children, 120, process=process)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(each.is_running() for each in started))


def test_other_threads_per_worker_are_named_as_what_changed(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "fsx"
    assert train_alone(capfd, recipe, root, "--train.max_steps=2")[0] == 0

    exit_code, output = call_trainer(capfd, recipe, root, "--parallel.threads_per_worker=2")

    assert exit_code == 3
    assert "parallel.threads_per_worker was 1 and is 2" in output
    assert "torch" not in output


def test_another_tensor_parallel_size_is_named_as_what_changed(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "fsx"
    assert train_alone(capfd, recipe, root, "--train.max_steps=2")[0] == 0

    exit_code, output = call_trainer(capfd, recipe, root, "--parallel.tensor_parallel_size=2")

    assert exit_code == 3
    assert "parallel.tensor_parallel_size was 1 and is 2" in output
    assert "--allow-changed-program" in output
    assert "the CPU" not in output


def test_a_second_command_says_that_the_run_is_complete_and_sees_to_its_report(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "fsx"
    assert train_alone(capfd, recipe, root)[0] == 0
    (report,) = root.glob("run/*/report.html")
    written = report.stat().st_mtime_ns
    newest = checkpoints(root)["step-00000020"]
    for left in ("step-00000015.removed-01234567.partial", "step-00000018.01234567.partial"):  # as if killed
        (newest.parent / left).mkdir()
        (newest.parent / left / shard_name(0)).touch()
    with noticing_opens(newest) as opens:
        exit_code, output = call_trainer(capfd, recipe, root)
    assert exit_code == 0
    assert {path.name for path in opens.paths} == {MANIFEST}
    assert sorted(path.name for path in newest.parent.iterdir()) == sorted(checkpoints(root))
    assert "the run is complete: step 20 of 20" in output
    assert report.stat().st_mtime_ns == written

    report.unlink()  # as if killed before it was written
    with noticing_opens(newest) as opens:
        assert call_trainer(capfd, recipe, root)[0] == 0
    assert {path.name for path in opens.paths} == {MANIFEST, shard_name(0), INDEX_FILE}
    state = read_state(report.parent)
    assert state is not None
    assert state.startswith("step-00000020 ")

    # As if it was that of a shorter run, which was made longer and killed before the report of its last part.
    report.write_text(report.read_text(encoding="utf-8").replace(state, "step-00000010 0123"), encoding="utf-8")
    assert call_trainer(capfd, recipe, root)[0] == 0
    assert read_state(report.parent) == state


def test_a_damaged_newest_checkpoint_is_said_by_the_command_and_others_can_be_inspected(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "fsx"
    assert train_alone(capfd, recipe, root, "--train.max_steps=10")[0] == 0
    flip_a_bit(checkpoints(root)["step-00000010"] / shard_name(0))

    for options, exit_code, said, not_said in (
        (("--step=5",), 0, "state       after step 5", "files are damaged"),
        (("--step=10",), 3, "shard-00000.safetensors: xxh3-128 is", "state  "),
        ((), 0, "state       after step 5", "state       after step 10"),
    ):
        found, printed = call_trainer(capfd, recipe, root, *options, command="inspect-checkpoint")
        assert (found, said in printed, not_said in printed) == (exit_code, True, False), printed

    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=12")
    assert exit_code == 0, output
    assert re.search(r"step 5.*\n  step-00000010", output)
    assert call_trainer(capfd, recipe, root, command="summary")[1].count("1 fallback") == 1


def test_training_succeeds_without_its_views_and_never_loads_the_model_for_them(
    tmp_path: Path,
    recipe: Path,
    corpus: Artifact[CorpusManifest],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "fsx"

    def out_of_memory(run: object) -> None:
        raise MemoryError

    with monkeypatch.context() as small_machine:
        small_machine.setattr("services.trainer.command.TextGenerator", out_of_memory)
        small_machine.setattr("services.trainer.report.run_report.read_status", out_of_memory)
        exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=2")
        assert exit_code == 0, output
        assert f"python -m services.trainer report --recipe {recipe} --root {root}" in output
        (run_folder,) = root.glob("run/*/")
        assert not (run_folder / "report.html").exists()

    for options, is_sampled in (([], False), (["--sample"], True)):
        assert main(["report", "--recipe", str(recipe), "--root", str(root), *options]) == 0
        page = (run_folder / "report.html").read_text(encoding="utf-8")
        assert ("If the" in page) is is_sampled
    assert main(["summary", "--recipe", str(recipe), "--root", str(root)]) == 0
    assert "The model writes:\n> If the" in capfd.readouterr().out


def test_a_corpus_without_a_training_sample_is_refused_with_its_numbers(
    tmp_path: Path, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_corpus(tmp_path / "fsx", make_recipe(tmp_path), rows=0)
    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx")
    assert exit_code == 3
    assert "17 tokens" in output
    assert f"python -m services.tokenizer --recipe {recipe}" in output


def test_a_run_can_be_looked_at_where_its_root_was_moved_or_mounted(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "fsx"
    assert train_alone(capfd, recipe, root, "--train.max_steps=2")[0] == 0
    moved = root.rename(tmp_path / "elsewhere")
    assert exit_code_of(lambda: main(["summary", "--recipe", str(recipe), "--root", str(moved)])) == 0
    assert str(moved / "corpus") in capfd.readouterr().out


def test_a_run_goes_on_under_another_program_only_when_told_and_remembers_it(
    tmp_path: Path,
    recipe: Path,
    corpus: Artifact[CorpusManifest],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "fsx"
    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=2")
    assert exit_code == 0, output
    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")  # other bits from the same source

    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=4")
    assert exit_code == 3
    assert "step-00000002: " in output
    assert "--allow-changed-program" in output
    assert list(checkpoints(root)) == ["step-00000002"]

    for steps, flags in ((4, ["--allow-changed-program"]), (6, [])):
        exit_code, output = train_alone(capfd, recipe, root, f"--train.max_steps={steps}", *flags)
        assert exit_code == 0, output
        newest = checkpoints(root)[f"step-{steps:08d}"]
        assert read_sealed(newest)["checkpoint"]["waivers"] == ["--allow-changed-program"]


def test_a_missing_corpus_names_the_command_that_makes_one(
    tmp_path: Path, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx")
    assert exit_code == 3
    assert f"python -m services.tokenizer --recipe {recipe}" in output


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("tokenizer", ("--corpus.sequence_length=32", '--corpus.sources=[{uri = "a b.txt"}]')),
        ("compiler", ("--compile.enabled=true", "--batch.micro_batch_size=2")),
    ],
)
def test_a_command_that_an_error_names_has_the_overrides_of_the_command_that_failed(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], stage: str, overrides: tuple[str, ...]
) -> None:
    """Without them it would make what is published already, and the same error would follow."""
    exit_code, output = run_trainer(recipe, tmp_path / "fsx", *overrides)
    assert exit_code == 3, output
    command = re.search(rf"`(python -m services\.{stage} .*?)`", output)
    assert command, output
    assert set(overrides) < set(shlex.split(command[1]))


def test_a_corpus_of_another_vocabulary_is_refused_with_both_sizes(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--model.vocab_size=400", "--tokenizer.train.vocab_size=400")
    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx", f"--corpus={corpus.path}", *sizes)
    assert exit_code == 3
    assert re.search(r"300 pieces.*model\.vocab_size is 400", output)


def test_an_unpublished_corpus_is_refused(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    (corpus.path / "manifest.json").unlink()
    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx", f"--corpus={corpus.path}")
    assert exit_code == 3
    assert "not a published artifact" in output


def test_an_unknown_recipe_key_names_the_nearest_one(
    tmp_path: Path, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx", "--train.max_stepz=3")
    assert exit_code == 2
    assert "Did you mean 'train.max_steps'?" in output


def test_a_root_that_cannot_be_written_exits_with_5(
    tmp_path: Path, recipe: Path, corpus: Artifact[CorpusManifest], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    exit_code, output = call_trainer(capfd, recipe, tmp_path / "file" / "fsx", f"--corpus={corpus.path}")
    assert exit_code == 5
    assert "pass another --root" in output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB: room for the corpus and no more than two checkpoints of 0.2 MB."""
    with mounted(tmp_path / "disk", "600k") as disk:
        yield disk


def test_a_full_disk_keeps_the_committed_checkpoints_and_the_run_goes_on_after_room_is_made(
    tmp_path: Path,
    recipe: Path,
    corpus: Artifact[CorpusManifest],
    small_disk: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = (f"--corpus={corpus.path}", "--checkpoint.interval_steps=1")
    exit_code, output = train_alone(capfd, recipe, small_disk, *options, "--checkpoint.keep_latest=10")
    assert exit_code == 5, output
    assert "bytes free" in output
    assert (status_of(small_disk).state, status_of(small_disk).exit_code) == ("failed", 5)
    committed = checkpoints(small_disk)
    assert committed
    assert [json.loads((path / "manifest.json").read_text())["id"] for path in committed.values()] == list(committed)

    remount(small_disk, "size=20m")
    exit_code, output = train_alone(capfd, recipe, small_disk, *options)
    assert exit_code == 0, output
