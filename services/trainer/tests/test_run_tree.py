"""`runs` lists a root's runs as a tree, `--dry-run` announces a branch, and the report names parent and branches."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.process.entry_point import exit_code_of
from services.common.testing.operations import count_operations
from services.trainer.__main__ import main
from services.trainer.job import RUN_FILE, Job
from services.trainer.loop import train
from services.trainer.run import open_run, summarize
from services.trainer.run_tree import read_runs
from services.trainer.tests.runs import call_trainer, train_alone
from services.trainer.tests.test_branch import ALONE, KEEPING


@pytest.fixture(scope="module")
def family(new_shared_job: Callable[..., Job]) -> list[Job]:
    """A run, a branch of it after step 5, and a branch of that one after step 6."""
    jobs: list[Job] = []
    for step, last in ((0, 10), (5, 6), (6, 7)):
        branch = {"train__branch": f'{{ run = "{jobs[-1].run}", step = {step} }}'} if jobs else {}
        jobs.append(new_shared_job(**KEEPING, **branch, train__max_steps=str(last)))
        train(jobs[-1], ALONE)
    return jobs


def test_the_runs_of_a_root_are_a_tree(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = family
    assert main(["runs", "--root", str(first.root)]) == 0
    listed = capfd.readouterr().out.splitlines()[1:]

    begins = [re.match(r"( *)(\S+) +(?:(\d+) of (\S+) +)?(\d+) +\d+\.\d{4}$", line) for line in listed]
    assert [match.groups() for match in begins if match] == [
        ("", first.run, None, None, "10"),
        ("  ", second.run, "5", first.run, "6"),
        ("    ", third.run, "6", second.run, "7"),
    ]


def test_a_root_without_runs_is_refused(tmp_path: Path) -> None:
    assert exit_code_of(lambda: main(["runs", "--root", str(tmp_path)])) == 3


def test_a_branch_is_listed_below_its_parent_when_its_file_is_lost(family: list[Job]) -> None:
    described = read_runs(family[0].root)
    path = family[1].run_folder / RUN_FILE
    content = path.read_bytes()
    path.unlink()
    try:
        assert read_runs(family[0].root) == described
    finally:
        path.write_bytes(content)


def test_the_summary_names_the_parent_and_the_branches(family: list[Job]) -> None:
    first, second, third = family

    of_first, of_second = (summarize(open_run(job.root, job.run)) for job in (first, second))

    assert re.search(rf"^branches +{second.run} after step 5$", of_first, re.MULTILINE)
    assert re.search(rf"^branched from {first.run} after step 5 ", of_second, re.MULTILINE)
    assert re.search(rf"^branches +{third.run} after step 6$", of_second, re.MULTILINE)
    assert "branched from" not in of_first


def test_a_listing_opens_files_by_the_number_of_runs_and_not_of_steps(new_job: Callable[..., Job]) -> None:
    opened = []
    for root, interval in (("few", "4"), ("many", "1")):
        job = new_job(root, checkpoint__interval_steps=interval, train__max_steps="8", checkpoint__keep_latest="10")
        train(job, ALONE)
        operations = count_operations(job.root)
        read_runs(job.root)
        opened.append(operations.count("open"))

    assert opened[0] == opened[1] > 0


def test_the_command_that_branches_says_so_before_and_when_it_starts(
    tmp_path: Path, new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    parent = new_job(train__max_steps="10")
    train(parent, ALONE)
    recipe = next(tmp_path.glob("*.toml"))
    branch = (f"--train.branch.run={parent.run}", "--train.branch.step=5", "--optimizer.learning_rate=0.005")

    code, planned = train_alone(capfd, recipe, parent.root, *branch, "--dry-run")
    assert code == 0
    assert re.search(r"^begins at step +5 of 20: a new run$", planned, re.MULTILINE)
    [announced] = re.findall(r"^branches from +(.*)$", planned, re.MULTILINE)
    assert announced.startswith(f"{parent.run} after step 5 ")
    assert "sample 40 " in announced
    assert "optimizer.learning_rate was 0.01 and is 0.005" in announced

    code, started = train_alone(capfd, recipe, parent.root, *branch, "--train.max_steps=7")
    assert code == 0
    assert f"branches from {parent.run} after step 5" in started
    assert call_trainer(capfd, recipe, parent.root, *branch, command="doctor")[0] == 0

    code, refused = train_alone(capfd, recipe, parent.root, *branch[:2], "--model.intermediate_size=64")
    assert code == 2
    assert "intermediate_size" in refused
    code, refused = train_alone(capfd, recipe, parent.root, branch[0], "--train.branch.step=6")
    assert code == 3
    assert parent.run in refused
