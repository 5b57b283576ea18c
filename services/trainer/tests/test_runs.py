"""`runs`, `compare` and `--dry-run` show runs, and what a reader of a run's folder sees: state, phases, cost."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.errors import ArtifactError, TryAgain
from services.common.hardware.instance_types import read_instance_types
from services.common.process.entry_point import exit_code_of
from services.trainer.__main__ import main
from services.trainer.job import RUN_FILE, Job
from services.trainer.metrics.commands import (
    FOLDER,
    LOST_SECONDS,
    read_commands,
    recording_command,
)
from services.trainer.metrics.records import METRICS_FILE, read_last_step, read_metrics
from services.trainer.runs.cost import compute_costs, divide_training
from services.trainer.runs.status import STATUS_HEADINGS, RunStatus, read_status
from services.trainer.tests.builders import NewJob, make_corpus, make_recipe, train_here, train_new
from services.trainer.tests.metric_lines import BEGAN, make_command
from services.trainer.tests.runs import OF_A_RUN, checkpoints, read_curves, train_alone


@pytest.fixture(scope="module")
def family(new_shared_job: NewJob) -> list[Job]:
    """A run, a branch of it after step 5, and a branch of that one after step 6."""
    jobs: list[Job] = []
    for step, last in ((0, 10), (5, 6), (6, 7)):
        branch = {"train__branch": f'{{ run = "{jobs[-1].run}", step = {step} }}'} if jobs else {}
        jobs.append(new_shared_job(checkpoint__keep_latest="10", **branch, train__max_steps=str(last)))
        train_here(jobs[-1])
    return jobs


def test_the_runs_of_a_root_are_a_tree(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = family
    assert main(["runs", "--root", str(first.root)]) == 0
    listed = capfd.readouterr().out.splitlines()[1:]

    found = [re.fullmatch(r"( *)(\S+) +done +(\d+)/(\d+) .* \d+ s(?: +(\d+))? *", line) for line in listed]
    assert [match.groups() for match in found if match] == [
        ("", first.run, "10", "10", None),
        ("  ", second.run, "6", "6", "5"),
        ("    ", third.run, "7", "7", "6"),
    ]


def test_the_table_of_many_runs_fits_a_terminal_and_shows_in_what_they_differ(
    new_job: NewJob, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [n for n in range(11, 30) if n % 10]
    rates = {new_job(optimizer__learning_rate=f"0.0{n}", train__seed=str(n)).run: f"0.0{n}" for n in numbers}
    job = train_new(new_job, train__max_steps="1", optimizer__learning_rate="0.01")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs", "--root", str(job.root)]) == 0
    headings, *lines = capfd.readouterr().out.splitlines()
    assert max(map(len, [headings, *lines])) <= 80
    assert {"run", "state", "validation"} <= {*headings.split()} <= {*STATUS_HEADINGS, "differs", "in"}
    assert not {"chip-hours", "cost"} & {*headings.split()}  # of accelerators and priced nodes
    for run, rate in (rates | {job.run: "0.01"}).items():
        [shown] = [line for line in lines if line.startswith(f"{run} ")]
        assert f"learning_rate {rate}" in shown


RUN_COMMANDS: dict[str, tuple[str, ...]] = dict.fromkeys(OF_A_RUN, ()) | {
    "evaluate": ("--launch=inline", "--parallel.data_parallel_size=1"),
    "export": ("--output={folder}/model",),
    "sample": ("--tokens=2",),
}


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_a_run_is_named_by_a_prefix_and_needs_no_recipe(
    family: list[Job], tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    run, root = family[1].run, str(family[1].root)
    options = [option.format(folder=tmp_path) for option in RUN_COMMANDS[command]]
    assert main([command, run[:-2], *options, "--root", root]) == 0
    printed = capfd.readouterr().out
    assert run in printed or command in ("sample", "export")
    for name in ("small-", "no-such-run"):  # several, and none
        assert exit_code_of(lambda name=name: main([command, name, *options, "--root", root])) == 2  # type: ignore[misc]


def test_the_file_of_a_run_is_its_recipe(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first = family[0]
    for steps, starts in ((10, "none: the run is complete, 10 of 10"), (20, "10 of 20, from ")):
        options = ("--dry-run", f"--train.max_steps={steps}")
        code, printed = train_alone(capfd, first.run_folder / RUN_FILE, first.root, *options)
        assert (code, first.run in printed, starts in printed) == (0, True, True), printed


def test_the_statuses_of_runs_are_json_lines(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = family
    for command in (["runs"], ["compare", *(job.run for job in family)], ["compare", "small"]):
        assert main([*command, "--root", str(first.root), "--json"]) == 0
        found = {each["run"]: each for each in map(json.loads, capfd.readouterr().out.splitlines())}
        assert [found[job.run]["step"] for job in family] == [10, 6, 7]
        assert (found[second.run]["state"], found[second.run]["parent"]["run"]) == ("done", first.run)
        assert (found[first.run]["parent"], found[third.run]["parent"]["step"]) == (None, 6)
        assert found[first.run]["recipe"]["train"]["max_steps"] == 10


def test_a_comparison_has_the_recipe_values_that_differ(family: list[Job], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, _ = family
    assert main(["compare", "--root", str(first.root), first.run, second.run[:-2]]) == 0
    printed = capfd.readouterr().out
    path = first.root / "run/comparison.html"
    assert printed.splitlines()[-1] == str(path)
    curves = read_curves(path.read_text())
    for job in (first, second):
        losses = [(each["step"], each["loss"]) for each in read_metrics(job.run_folder)]
        assert np.array(curves["loss", job.run]) == pytest.approx(np.array(losses), rel=1e-5)
    assert {chart for chart, _ in curves} >= {"loss", "validation-loss", "gradient-norm", "throughput", "goodput"}
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
        (["compare"], 2),
        (["compare", "{run}"], 2),
        (["compare", "{run}", "{run}"], 2),
        (["compare", "{run}", "no-such-run"], 2),
        (["runs", "--root=/nonexistent"], 3),
    ],
)
def test_runs_that_are_missing_or_not_meant_are_refused(family: list[Job], words: list[str], exit_code: int) -> None:
    command, *options = (word.format(run=family[0].run) for word in words)
    assert exit_code_of(lambda: main([command, "--root", str(family[0].root), *options])) == exit_code


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


@pytest.fixture(scope="module")
def trained(new_shared_job: NewJob) -> Path:
    """A folder with a recipe, and a root with 2 steps of its run."""
    return train_new(new_shared_job, "fsx", train__max_steps="2", checkpoint__interval_steps="2").root.parent


def dry_run(folder: Path, capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """The rows of the table by name."""
    exit_code, printed = train_alone(capfd, folder / "small.toml", folder / "fsx", "--dry-run", *options)
    assert exit_code == 0, printed
    table = printed.rpartition("\n}\n")[2]
    return dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", table, re.MULTILINE))


def test_the_same_recipe_continues_its_run_and_a_longer_one_too(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [checkpoint] = checkpoints(trained / "fsx").values()
    run = checkpoint.parent.name

    complete = dry_run(trained, capfd, "--train.max_steps=2")
    assert (complete["run"], complete["starts at step"]) == (run, "none: the run is complete, 2 of 2")
    longer = dry_run(
        trained, capfd, "--train.max_steps=4000", "--checkpoint.interval_steps=7", "--compile.num_workers=3"
    )
    assert (longer["run"], longer["starts at step"]) == (run, f"2 of 4,000, from {checkpoint}")
    assert "differs from" not in longer


def test_another_learning_rate_is_said_to_be_a_new_run_and_what_differs(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [checkpoint] = checkpoints(trained / "fsx").values()
    before = json.loads((trained / "fsx/run" / checkpoint.parent.name / RUN_FILE).read_text())["recipe"]

    shown = dry_run(trained, capfd, "--optimizer.learning_rate=0.5", "--model.hidden_size=64")

    assert shown["run"] != checkpoint.parent.name
    assert shown["starts at step"].startswith("0 of ")
    assert shown["differs from"].startswith(f"{checkpoint.parent.name}: ")
    for key, now in (("optimizer.learning_rate", 0.5), ("model.hidden_size", 64)):
        section, name = key.split(".")
        assert f"{key} was {before[section][name]} and is {now}" in shown["differs from"]


def test_neither_a_missing_corpus_nor_a_damaged_run_is_an_obstacle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    shown = dry_run(tmp_path, capfd)
    assert "tokenizer" in shown["run"]  # the next command
    assert "starts at step" not in shown

    make_corpus(tmp_path / "fsx", recipe)
    damaged = tmp_path / "fsx/run" / f"{recipe.name}-01234567"
    damaged.mkdir(parents=True)
    (damaged / RUN_FILE).write_text("{")
    assert dry_run(tmp_path, capfd)["differs from"].startswith(damaged.name)


@pytest.mark.parametrize(("steps", "is_warned"), [(40, False), (41, True)])
def test_more_than_4_epochs_are_warned_of(
    trained: Path, capfd: pytest.CaptureFixture[str], steps: int, is_warned: bool
) -> None:
    """The corpus has 80 samples, and a step takes 8."""
    rows = dry_run(trained, capfd, f"--train.max_steps={steps}", f"--optimizer.decay_steps={steps}")
    assert rows["epochs in max_steps"] == f"{steps / 10:.2f}"
    assert ("step 40" in rows.get("warning, epochs", "")) == is_warned


NOW = BEGAN + 1_000


def status_of(job: Job, now: float | None = None) -> RunStatus:
    return read_status(job.root, job.run, now)


def on_trainium(job: Job, started_at: datetime | None = None) -> Job:
    """Return the job of a recipe for two nodes of trn1, whose command began at `started_at`."""
    nodes = {"trainer_instance_type": "trn1.32xlarge", "trainer_workers_per_node": 1}
    recipe = job.recipe.model_copy(update={"cluster": job.recipe.cluster.model_copy(update=nodes)})
    return replace(job, recipe=recipe, launch="ray", started_at=started_at or job.started_at)


@pytest.mark.parametrize(
    ("error", "state", "exit_code"),
    [
        (None, "done", 0),
        (TryAgain("a node was lost"), "stopped", 75),
        (KeyboardInterrupt(), "stopped", 130),
        (ArtifactError("a corpus is damaged"), "failed", 3),
        (ZeroDivisionError("a bug"), "failed", 1),
    ],
)
def test_the_state_follows_the_exit_code_of_the_newest_command(
    new_job: NewJob, error: BaseException | None, state: str, exit_code: int
) -> None:
    job = new_job()
    assert status_of(job).state == read_status(job.root, "no-such-run").state == "not started"
    with pytest.raises(type(error)) if error else nullcontext(), recording_command(job):
        assert status_of(job).state == "running"
        if error:
            raise error

    found = status_of(job)
    assert (found.state, found.exit_code, found.cost) == (state, exit_code, None)  # CPUs have no price
    assert found.error == (str(error) if error else None)


def test_a_command_of_another_node_is_lost_once_its_record_stands_still(new_job: NewJob) -> None:
    job = new_job()
    with recording_command(job):
        [path] = (job.run_folder / FOLDER).iterdir()
        record = json.loads(path.read_bytes())
        # As the container of another machine wrote it, which cannot be asked whether the process runs.
        path.write_text(json.dumps(record | {"node": "another"}))
        assert status_of(job, record["seen_at"] + LOST_SECONDS - 1).state == "running"
        assert status_of(job, record["seen_at"] + LOST_SECONDS + 1).state == "lost"


@pytest.mark.parametrize("damage", [b'{"attempt": "torn', b"\0" * 40 + b"\n", b"{}\n", b""])
def test_a_damaged_record_of_a_killed_command_harms_no_later_one(new_job: NewJob, damage: bytes) -> None:
    job = new_job()
    with recording_command(job):
        pass
    (job.run_folder / FOLDER / "00002.json").write_bytes(damage)

    with pytest.raises(TryAgain), recording_command(job):
        raise TryAgain("é" * 10_000)  # its characters have several bytes in JSON

    assert [record.exit_code for record in read_commands(job.run_folder)] == [0, 75]


def test_chip_hours_and_cost_count_the_nodes_of_all_commands(new_job: NewJob) -> None:
    job, price = new_job(), read_instance_types()["trn1.32xlarge"].dollars_per_hour
    assert price
    for hours, launch in ((3, "ray"), (1, "inline")):  # without a cluster a command holds one node
        with recording_command(replace(on_trainium(job, datetime.now(UTC) - timedelta(hours=hours)), launch=launch)):
            pass

    assert [(each.nodes, each.workers) for each in read_commands(job.run_folder)] == [(2, 2), (1, 2)]
    found = status_of(job)
    assert found.chip_hours == pytest.approx((3 * 2 + 1) * 16, rel=0.01)
    assert found.cost == pytest.approx((3 * 2 + 1) * price, rel=0.01)


def test_a_run_s_costs_count_held_computing_and_lost_node_hours_by_stage(new_job: NewJob) -> None:
    """The first command did six steps, of which the newest checkpoint has four, and died an hour after the last one."""
    job = new_job(train__max_steps="6", checkpoint__interval_steps="4")
    trainium = on_trainium(job)
    with recording_command(trainium):
        train_here(job)
    found = status_of(job)
    assert (found.state, found.step, found.checkpoint_step, found.max_steps) == ("done", 6, 6, 6)
    assert (found.tokens, found.seconds_left) == (found.total_tokens, 0)
    assert None not in (found.loss, found.validation_loss, found.tokens_per_second, found.began_at)
    shutil.rmtree(job.checkpoint_collection / "step-00000006")
    record, path = read_commands(job.run_folder)[0], job.run_folder / METRICS_FILE
    steps = [step | {"time": step["time"] - 3_600} for step in map(json.loads, path.read_text().splitlines())]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    killed = {"began_at": record.began_at - 3_600, "ended_at": None, "exit_code": None}
    (job.run_folder / FOLDER / "00001.json").write_text(record.model_copy(update=killed).model_dump_json())

    second = replace(trainium, attempt="second", started_at=datetime.now(UTC))
    with recording_command(second):
        train_here(replace(job, attempt="second", started_at=second.started_at))

    *others, cost = compute_costs(job.recipe, job.corpus.payloads.values(), job.cache, job.run_folder)
    assert [each.stage for each in (*others, cost)] == ["tokenizer", "trainer"]
    assert cost.chip_hours == pytest.approx(16 * cost.held_node_hours)
    newest = read_last_step(job.run_folder)
    assert newest
    redone = steps[5]["productive_seconds"] - steps[3]["productive_seconds"]
    assert newest["redone_seconds"] == pytest.approx(redone)
    assert redone > 0
    assert newest["restart_seconds"] == pytest.approx(3_600, abs=60)
    assert cost.lost_node_hours == pytest.approx(2 * (redone + newest["restart_seconds"]) / 3_600)
    assert cost.computing_node_hours == pytest.approx(2 * newest["productive_seconds"] / 3_600)
    assert cost.computing_node_hours + cost.lost_node_hours < cost.held_node_hours


def phases_of(*records: Any, events: Any = (), attempts: Any = ()) -> list[tuple[str, float, float]]:
    """Return the name, the start after BEGAN, and the seconds of each phase."""
    found = divide_training(records, events, attempts, NOW)
    return [(each.name, each.started_at.timestamp() - BEGAN, each.seconds) for each in found]


def test_each_second_of_a_run_whose_workers_and_command_were_killed_is_in_one_phase() -> None:
    """The first workers recorded their end before others followed them, and those of the second start were killed."""
    killed = make_command(0, 120)
    finished = make_command(160, 260, ended_at=BEGAN + 260, exit_code=0)
    restarts = [{"event": "restart", "time": BEGAN + at, "attempt": killed.attempt} for at in (70, 100)]
    attempts = [
        {"started_at": BEGAN + start, "setup_seconds": 6, "train_seconds": seconds}
        for start, seconds in ((1, 60), (160, 93))
    ]
    assert phases_of(killed, finished, events=restarts, attempts=attempts) == [
        *(("start", 1, 6), ("train", 7, 60), ("killed", 70, 30), ("killed", 100, 20)),
        *(("start", 160, 6), ("train", 166, 93)),
    ]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"exit_code": 75, "ended_at": BEGAN + 50}, ["failed"]),
        ({"seen_at": NOW - 1}, ["running"]),
        ({"exit_code": 0, "ended_at": BEGAN + 50}, []),  # it found the run complete
    ],
)
def test_a_command_without_a_recorded_start_is_named_by_its_end(fields: dict[str, Any], names: list[str]) -> None:
    assert [each[0] for each in phases_of(make_command(0, 50, **fields))] == names
