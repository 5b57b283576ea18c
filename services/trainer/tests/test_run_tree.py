"""`runs` lists a root's runs as a tree, `--dry-run` announces a branch, and the report names parent and branches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from services.common.launch.launcher import WorkerEnvironment
from services.common.process.entry_point import exit_code_of
from services.trainer.__main__ import main
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.tests.runs import train_alone

ALONE = WorkerEnvironment(rank=0, world_size=1)


@pytest.fixture(scope="module")
def family(new_shared_job: Callable[..., Job]) -> list[Job]:
    """A run, a branch of it after step 5, and a branch of that one after step 6."""
    jobs: list[Job] = []
    for step, last in ((0, 10), (5, 6), (6, 7)):
        branch = {"train__branch": f'{{ run = "{jobs[-1].run}", step = {step} }}'} if jobs else {}
        jobs.append(new_shared_job(checkpoint__keep_latest="10", **branch, train__max_steps=str(last)))
        train(jobs[-1], ALONE)
    return jobs


def test_the_runs_of_a_root_are_a_tree(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = family
    assert main(["runs", "--root", str(first.root)]) == 0
    listed = capfd.readouterr().out.splitlines()[1:]

    found = [re.fullmatch(r"( *)(\S+) +done +(\d+) of (\d+) .* \d+ s(?: +(\d+) of (\S+))? *", line) for line in listed]
    assert [match.groups() for match in found if match] == [
        ("", first.run, "10", "10", None, None),
        ("  ", second.run, "6", "6", "5", first.run),
        ("    ", third.run, "7", "7", "6", second.run),
    ]


def test_the_statuses_of_runs_are_json_lines(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = family
    for command in (["runs"], ["compare", "--runs", ",".join(job.run for job in family)]):
        assert main([*command, "--root", str(first.root), "--json"]) == 0
        found = {each["run"]: each for each in map(json.loads, capfd.readouterr().out.splitlines())}
        assert [found[job.run]["step"] for job in family] == [10, 6, 7]
        assert (found[second.run]["state"], found[second.run]["parent"]["run"]) == ("done", first.run)
        assert (found[first.run]["parent"], found[third.run]["parent"]["step"]) == (None, 6)


def test_a_comparison_has_the_recipe_values_that_differ(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, _ = family
    assert main(["compare", "--root", str(first.root), "--runs", f"{first.run},{second.run}"]) == 0
    printed = capfd.readouterr().out
    path = first.root / "run/comparison.html"
    assert printed.splitlines()[-1] == str(path)
    page = path.read_text().replace("<wbr>", "")
    assert all(each in page for each in (first.run, second.run, "train.max_steps", "<figure"))
    rows = dict(re.findall(r"^(\w+\.\S+) +(.*)$", printed, re.MULTILINE))
    assert {name: values.split() for name, values in rows.items()} == {
        "train.max_steps": ["10", "6"],
        "train.branch": ["null", "-"],
        "train.branch.run": ["-", first.run],
        "train.branch.step": ["-", "5"],
        "train.branch.data": ["-", "continue"],
    }


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["compare", "--runs={run}"], 2),
        (["compare", "--runs=small-,small-"], 2),
        (["compare", "--runs={run},no-such-run"], 2),
        (["report", "--run=no-such-run"], 2),
        (["runs", "--root=/nonexistent"], 3),
    ],
)
def test_runs_that_are_missing_or_not_meant_are_refused(family: list[Job], words: list[str], exit_code: int) -> None:
    command, *options = (word.format(run=family[0].run) for word in words)
    assert exit_code_of(lambda: main([command, "--root", str(family[0].root), *options])) == exit_code


def test_a_report_is_written_of_the_run_that_is_named(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    run, root = family[1].run, family[1].root
    assert main(["report", "--root", str(root), "--run", run[:-2]]) == 0
    assert capfd.readouterr().out.strip() == str(root / "run" / run / "report.html")


def test_the_summary_names_the_parent_and_the_branches(family: list[Job]) -> None:
    first, second, third = family

    of_first, of_second = (summarize(open_run(job.root, job.run)) for job in (first, second))

    assert re.search(rf"^branches +{second.run} after step 5$", of_first, re.MULTILINE)
    assert re.search(rf"^branched from +{first.run} after step 5 ", of_second, re.MULTILINE)
    assert re.search(rf"^branches +{third.run} after step 6$", of_second, re.MULTILINE)
    assert "branched from" not in of_first


@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        (["--train.branch.step=5", "--optimizer.learning_rate=0.005", "--train.max_steps=7"], 0),
        (["--train.branch.step=5", "--model.intermediate_size=64"], 2),
        (["--train.branch.step=6"], 3),
    ],
)
def test_the_command_that_branches_refuses_what_no_branch_can_have(
    family: list[Job], capfd: pytest.CaptureFixture[str], options: list[str], exit_code: int
) -> None:
    parent = family[0]
    recipe = next(parent.root.parent.glob("*.toml"))
    code, printed = train_alone(capfd, recipe, parent.root, f"--train.branch.run={parent.run}", *options)
    assert code == exit_code, printed
