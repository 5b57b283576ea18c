"""Whatever lies where a file of somebody else belongs: commands end with words, wait for nothing, leave nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch

from services.common.testing.strange_files import STRANGE_FILES, replace_by
from services.trainer.conversion.dcp.metadata import METADATA
from services.trainer.conversion.export import export
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.evaluation.records import EVALUATIONS_FILE
from services.trainer.job import RUN_FILE, Job
from services.trainer.loop import train
from services.trainer.metrics.events import EVENTS_FILE, read_events, record_event
from services.trainer.metrics.records import ATTEMPTS_FILE, METRICS_FILE
from services.trainer.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.dcp_files import save
from services.trainer.tests.runs import REPOSITORY, call_trainer
from services.trainer.tests.test_import import ALONE, digest_in

CONFIG, WEIGHTS, INDEX, PART = (
    *("config.json", "model.safetensors", "model.safetensors.index.json"),
    "model-00001-of-00001.safetensors",
)
VOCABULARY, RANK_FILE = "tokenizer.model", "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"


@pytest.fixture(scope="module")
def run_of_one_step(new_shared_job: Callable[..., Job]) -> Job:
    job = new_shared_job(train__max_steps="1")
    train(job, ALONE)
    return job


@pytest.fixture(scope="module")
def sources(run_of_one_step: Job) -> dict[str, Path]:
    """The same weights in one file, behind an index, and as checkpoints of NxD and of torch.distributed.checkpoint."""
    run, folder = open_run(run_of_one_step.root, run_of_one_step.run), run_of_one_step.root.parent / "sources"
    folder.mkdir()
    whole = export(run, folder / "whole")
    cut = Path(shutil.copytree(whole, folder / "cut"))
    (cut / WEIGHTS).rename(cut / PART)
    names = safetensors.torch.load_file(cut / PART)
    (cut / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, PART)}), encoding="utf-8")
    dcp = save(folder / "dcp", dict(names))
    return {"whole": whole, "cut": cut, "nxd": export(run, folder / "nxd", NxdLayout(1)), "dcp": dcp}


def import_from(capfd: pytest.CaptureFixture[str], job: Job, folder: Path) -> tuple[int, str]:
    return call_trainer(capfd, write_recipe(job.root.parent), job.root, f"--from={folder}", command="import")


@pytest.mark.parametrize("kind", STRANGE_FILES)
@pytest.mark.parametrize(
    ("source", "file"),
    [
        *(("whole", CONFIG), ("whole", WEIGHTS), ("whole", VOCABULARY)),
        *(("cut", INDEX), ("cut", PART), ("nxd", RANK_FILE), ("dcp", METADATA), ("dcp", "__0_0.distcp")),
    ],
)
def test_an_import_ends_at_what_is_no_file_of_its_folder(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    sources: dict[str, Path],
    run_of_one_step: Job,
    source: str,
    file: str,
    kind: str,
) -> None:
    folder = Path(shutil.copytree(sources[source], tmp_path / "a" / "b" / "source"))
    replace_by(kind, folder / file)
    before = sorted(run_of_one_step.root.rglob("*"))

    exit_code, printed = import_from(capfd, run_of_one_step, folder)

    assert exit_code == 3
    assert str(folder / file) in printed
    assert "--root" not in printed
    assert sorted(run_of_one_step.root.rglob("*")) == before


def test_a_link_that_stays_inside_of_an_import_source_is_followed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sources: dict[str, Path], run_of_one_step: Job
) -> None:
    folder = Path(shutil.copytree(sources["whole"], tmp_path / "source"))
    (folder / WEIGHTS).rename(folder / "blob")
    (folder / WEIGHTS).symlink_to("blob")

    exit_code, printed = import_from(capfd, run_of_one_step, folder)

    assert exit_code == 2
    assert len(digest_in(printed)) == 64


@pytest.mark.parametrize("place", ["absent", "file", "x" * 5_000, "a/" * 2_500])
def test_an_import_source_that_is_no_folder_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run_of_one_step: Job, place: str
) -> None:
    (tmp_path / "file").touch()

    exit_code, printed = call_trainer(
        capfd,
        write_recipe(run_of_one_step.root.parent),
        run_of_one_step.root,
        f"--from={tmp_path / place}",
        command="import",
    )

    assert exit_code in (2, 3)
    assert str(tmp_path) in printed
    assert "--root" not in printed


@pytest.mark.parametrize("kind", STRANGE_FILES)
@pytest.mark.parametrize("file", [RUN_FILE, METRICS_FILE, ATTEMPTS_FILE, EVALUATIONS_FILE])
def test_a_report_ends_at_what_is_no_file_of_its_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run_of_one_step: Job, file: str, kind: str
) -> None:
    root = Path(shutil.copytree(run_of_one_step.root, tmp_path / "a" / "fsx"))
    path = root / "run" / run_of_one_step.run / file
    replace_by(kind, path)

    exit_code, printed = call_trainer(
        capfd, write_recipe(run_of_one_step.root.parent), root, "--train.max_steps=1", command="report"
    )

    if exit_code == 0:  # a link to nowhere is a file that is not there
        assert kind in ("link to nowhere", "link outside")
        return
    assert exit_code == 3
    assert str(path.parent) in printed
    assert "--root" not in printed.replace("--root DIR", "").replace(f"--root {root}`", "")


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device that is full"])
def test_events_go_on_without_a_file_that_can_hold_them(new_job: Callable[..., Job], kind: str) -> None:
    job = new_job()
    replace_by(kind, job.run_folder / EVENTS_FILE)

    record_event(job, "restart", message="lost")
    assert read_events(job.run_folder) == []


def test_an_import_from_a_pipe_ends_as_a_process_and_frees_the_lease(
    tmp_path: Path, sources: dict[str, Path], run_of_one_step: Job
) -> None:
    folder = Path(shutil.copytree(sources["whole"], tmp_path / "source"))
    replace_by("pipe", folder / WEIGHTS)
    command = [
        sys.executable,
        "-m",
        "services.trainer",
        "import",
        "--recipe",
        str(write_recipe(run_of_one_step.root.parent)),
    ]
    options = ["--root", str(run_of_one_step.root), f"--from={folder}"]

    done = subprocess.run(
        [*command, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 3, done.stderr
    assert "a pipe, expected a regular file" in done.stderr
    assert not list(run_of_one_step.root.glob("run/*.lock"))
