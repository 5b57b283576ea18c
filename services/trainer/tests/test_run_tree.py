"""`runs` lists a root's runs as a tree, `--dry-run` announces a branch, and the report names parent and branches."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.process.entry_point import exit_code_of
from services.trainer.__main__ import main
from services.trainer.job import RUN_FILE, Job
from services.trainer.loop import train
from services.trainer.metrics.records import METRICS_FILE
from services.trainer.run import open_run, summarize
from services.trainer.runs.status import read_statuses
from services.trainer.tests.runs import train_alone
from services.trainer.tests.test_branch import ALONE, KEEPING

PROCESS_IO = Path("/proc/self/io")


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

    found = [re.fullmatch(r"( *)(\S+) +done +(\d+) of (\d+) .* \d+ s(?: +(\d+) of (\S+))? *", line) for line in listed]
    assert [match.groups() for match in found if match] == [
        ("", first.run, "10", "10", None, None),
        ("  ", second.run, "6", "6", "5", first.run),
        ("    ", third.run, "7", "7", "6", second.run),
    ]


def test_a_root_without_runs_is_refused(tmp_path: Path) -> None:
    assert exit_code_of(lambda: main(["runs", "--root", str(tmp_path)])) == 3


def test_a_branch_is_listed_at_the_top_when_its_file_is_lost(family: list[Job]) -> None:
    described = tree_of(family[0].root)
    path = family[1].run_folder / RUN_FILE
    content = path.read_bytes()
    path.unlink()
    try:
        found = tree_of(family[0].root)
    finally:
        path.write_bytes(content)
    assert found == [(run, *((None, 0) if run == family[1].run else parent)) for run, *parent in described]


@pytest.mark.parametrize("command", ["runs", "compare"])
def test_the_statuses_of_runs_are_json_lines(
    family: list[Job], command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = family
    chosen = ["--runs", f"{first.run},{second.run}"] if command == "compare" else []
    assert main([command, "--root", str(first.root), "--json", *chosen]) == 0
    found = {each["run"]: each for each in map(json.loads, capfd.readouterr().out.splitlines())}
    assert (found[second.run]["state"], found[second.run]["step"]) == ("done", 6)
    assert (found[second.run]["parent"]["run"], found[second.run]["parent"]["step"]) == (first.run, 5)
    assert found[first.run]["parent"] is None


def test_a_comparison_has_the_recipe_values_that_differ(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, _ = family
    assert main(["compare", "--root", str(first.root), "--runs", f"{first.run},{second.run}"]) == 0
    printed = capfd.readouterr().out

    for run, steps in ((first.run, "10 of 10"), (second.run, "6 of 6")):
        assert re.search(rf"^{run} +done +{steps} ", printed, re.MULTILINE)
    [_, table] = printed.split("recipe value")
    page = (first.root / "run/comparison.html").read_text().replace("<wbr>", "")
    assert printed.splitlines()[-1] == str(first.root / "run/comparison.html")
    assert page.count("<figure") >= 5
    for each in (first.run, second.run, "train.max_steps"):
        assert each in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    rows = dict(re.findall(r"^(\w+\.\S+) +(.*)$", table, re.MULTILINE))
    assert {name: values.split() for name, values in rows.items()} == {
        "train.max_steps": ["10", "6"],
        "train.branch": ["null", "-"],
        "train.branch.run": ["-", first.run],
        "train.branch.step": ["-", "5"],
        "train.branch.data": ["-", "continue"],
    }


@pytest.mark.parametrize("names", ["{run}", "small-,small-", "{run},no-such-run", "{run},"])
def test_a_comparison_refuses_runs_that_are_missing_or_not_meant(
    family: list[Job], names: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--root", str(family[0].root), "--runs", names.format(run=family[0].run)]
    assert exit_code_of(lambda: main(words)) == 2


def test_a_report_is_written_of_the_run_that_is_named(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    run, root = family[1].run, family[1].root
    assert main(["report", "--root", str(root), "--run", run[:-2]]) == 0
    assert capfd.readouterr().out.strip() == str(root / "run" / run / "report.html")
    assert exit_code_of(lambda: main(["report", "--root", str(root), "--run", "no-such-run"])) == 2


def tree_of(root: Path) -> list[tuple[str, str | None, int]]:
    return [(each.run, each.parent.run if each.parent else None, each.branch_step) for each in read_statuses(root)]


def test_the_summary_names_the_parent_and_the_branches(family: list[Job]) -> None:
    first, second, third = family

    of_first, of_second = (summarize(open_run(job.root, job.run)) for job in (first, second))

    assert re.search(rf"^branches +{second.run} after step 5$", of_first, re.MULTILINE)
    assert re.search(rf"^branched from {first.run} after step 5 ", of_second, re.MULTILINE)
    assert re.search(rf"^branches +{third.run} after step 6$", of_second, re.MULTILINE)
    assert "branched from" not in of_first


@pytest.mark.skipif(not PROCESS_IO.exists(), reason="only Linux counts the bytes that a process reads")
def test_a_listing_of_ten_runs_of_a_million_steps_reads_less_than_a_megabyte(family: list[Job], tmp_path: Path) -> None:
    """The metrics are files of 800 MB with a hole before the newest record."""
    last = (family[0].run_folder / METRICS_FILE).read_bytes().splitlines()[-1]
    record = json.loads(last) | {"step": 1_000_000, "tokens": 10**9}
    for number in range(10):
        folder = tmp_path / "run" / f"long-{number}"
        shutil.copytree(family[0].run_folder, folder)
        with (folder / METRICS_FILE).open("r+b") as file:
            file.seek(800 * 2**20)
            file.write(b"\n" + json.dumps(record).encode() + b"\n")

    before = bytes_read()
    runs = read_statuses(tmp_path)

    assert bytes_read() - before < 2**20
    assert [status.step for status in runs] == [1_000_000] * 10


def bytes_read() -> int:
    """Return the bytes that this process has read from files, pipes and sockets."""
    return int(re.search(r"rchar: (\d+)", PROCESS_IO.read_text())[1])  # type: ignore[index]


def test_the_command_that_branches_names_the_parent_and_refuses_what_no_branch_can_have(
    tmp_path: Path, new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    parent = new_job(train__max_steps="10")
    train(parent, ALONE)
    recipe = next(tmp_path.glob("*.toml"))
    branch = (f"--train.branch.run={parent.run}", "--train.branch.step=5")

    for options, expected in (
        ((*branch, "--optimizer.learning_rate=0.005", "--dry-run"), 0),
        ((*branch, "--optimizer.learning_rate=0.005", "--train.max_steps=7"), 0),
        ((*branch, "--model.intermediate_size=64"), 2),
        ((branch[0], "--train.branch.step=6"), 3),
    ):
        code, printed = train_alone(capfd, recipe, parent.root, *options)
        assert code == expected, printed
        assert parent.run in printed or code == 2
