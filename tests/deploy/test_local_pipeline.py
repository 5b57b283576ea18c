"""A pipeline on this machine: order of the stages, exit codes, signals, and the view of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.client.pipeline_view import PipelineView
from deploy.local import local_pipeline
from deploy.local.local_pipeline import LocalPipeline, run_local_pipeline
from services.common.recipe.schema import STAGES

STAGE = """
import json, os, signal, sys, time
stage, folder, behaviour = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]).get(sys.argv[1], {})
def stop(signum, frame):
    open(f"{folder}/{stage}.signal", "a").write(f"{signum}\\n")
    sys.exit(130 if signum == signal.SIGINT else 75)
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, stop)
with open(f"{folder}/{stage}.begun", "w") as begun:  # a signal in a destructor would be lost
    begun.write(" ".join(sorted(os.listdir(folder))))
for other in behaviour.get("waits_for", []):
    while not os.path.exists(f"{folder}/{other}"):
        time.sleep(0.01)
if behaviour.get("signal"):
    os.kill(os.getppid(), behaviour["signal"])
    time.sleep(60)
print(f"{stage} works", flush=True)
print("encode: 5/10 bytes", file=sys.stderr, flush=True)
if behaviour.get("exit_code"):
    print(f"millrace: {stage} cannot", file=sys.stderr)
    sys.exit(behaviour["exit_code"])
print(behaviour.get("said", "published"), f"{folder}/{stage}", flush=True)
open(f"{folder}/{stage}.ended", "w").close()
"""
"""A program in place of a stage: it notes its begin and its end in a folder, and behaves as the third argument says."""

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a pipeline of programs that behave as the arguments say."""
    program, folder = tmp_path / "stage.py", tmp_path / "fsx"
    program.write_text(STAGE, encoding="utf-8")
    folder.mkdir()

    def run_stages(**behaviour: object) -> int:
        made = lambda stage, *_: ["python", str(program), stage, str(folder), json.dumps(behaviour)]  # noqa: E731
        monkeypatch.setattr(local_pipeline, "make_command", made)
        return run_local_pipeline(LocalPipeline(Path("recipe.toml"), folder, (), "make pipeline ROOT=elsewhere"))

    return run_stages


def read(folder: Path, name: str) -> str:
    return (folder / "fsx" / name).read_text(encoding="utf-8")


def test_the_trainer_follows_the_two_others_which_run_side_by_side(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(tokenizer={"waits_for": ["compiler.begun"]}, compiler={"waits_for": ["tokenizer.begun"]})
    said = capfd.readouterr().out
    assert code == 0
    assert {"tokenizer.ended", "compiler.ended"} <= set(read(tmp_path, "trainer.begun").split())
    told = [(f"{stage} works\n", f"pipeline: {stage}: published, {tmp_path}/fsx/{stage}\n") for stage in STAGES]
    assert [each for lines in told for each in lines if each not in said] == []


def test_what_is_published_is_skipped_and_said(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ("already published:", "the run is complete: step 9 of 9,", "trained to step 1,300:")
    assert run(**{stage: {"said": line} for stage, line in zip(STAGES, lines, strict=True)}) == 0
    said = capfd.readouterr().out
    for stage, end in zip(STAGES, (*["skipped, already published: "] * 2, "published, "), strict=True):
        assert f"pipeline: {stage}: {end}{tmp_path}/fsx/{stage}\n" in said


def test_the_first_failure_ends_the_pipeline_with_its_exit_code_and_the_next_command(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(compiler={"exit_code": 4}) == 4
    said = capfd.readouterr().err
    assert "make pipeline ROOT=elsewhere" in said
    assert (tmp_path / "fsx/tokenizer.ended").exists()
    assert not (tmp_path / "fsx/trainer.begun").exists()


@pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 75), (1, 75)])
def test_a_stop_signal_reaches_the_stages_and_no_further_one_begins(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], signum: int, code: int
) -> None:
    assert run(tokenizer={"waits_for": ["compiler.begun"], "signal": signum}, compiler={"waits_for": ["never"]}) == code
    assert read(tmp_path, "tokenizer.signal").split() == [str(signum)]
    assert read(tmp_path, "compiler.signal").split() == [str(signum)]
    assert not (tmp_path / "fsx/trainer.begun").exists()
    assert "make pipeline ROOT=elsewhere" in capfd.readouterr().err


def test_the_cost_counts_the_time_in_which_a_stage_holds_its_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with PipelineView(["trainer"], prices="list prices") as view:
        view.wait("trainer", "2 of 4 nodes")
        now = 1_000.0
        view.begin("trainer", dollars_per_hour=36.0)
        now = 2_000.0
        view.wait("trainer", "1 of 4 nodes was lost")
        now = 9_000.0
        view.begin("trainer", dollars_per_hour=36.0)
        now = 10_000.0
        view.end("trainer", 0)
    assert "trainer published in 33 min 20 s; $20.00 so far (list prices)" in capsys.readouterr().out
