"""The report: every number is computed again from the run's files, curves keep their spikes, and a browser draws all.

The recomputation reads the JSON lines and manifests with the standard library alone, and shares no code with the
report.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.testing.browser import Browser, find_browser
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.report.curves import CHARTS, MAX_LABELS, MAX_MARKS, MAX_POINTS, RunCurves, Series
from services.trainer.report.run_report import write_report
from services.trainer.runs.run import open_started_run
from services.trainer.tests import work
from services.trainer.tests.builders import QWEN_3, NewJob, train_new
from services.trainer.tests.metric_lines import STEP, make_steps
from services.trainer.tests.runs import checkpoints, read_charts, read_curves

STEPS = 137
REPEATED_FROM = 50
POISONED = (20, 80, 136)
"""Numbers of the steps whose gradients are not finite; the last of them is the run's last step."""

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")
needs_axe = pytest.mark.skipif(importlib.util.find_spec("axe_core_python") is None, reason="no axe-core-python")

SOURCES = ("hf://a", "<!--<script>b.txt")


def newest_of_each_step(path: Path) -> list[dict[str, Any]]:
    records = {record["step"]: record for record in map(json.loads, path.read_text().splitlines())}
    return [records[step] for step in sorted(records)]


class RawRun:
    """A run's numbers, computed from its files."""

    def __init__(self, run_folder: Path, root: Path) -> None:
        described = json.loads((run_folder / "run.json").read_text())
        self.recipe = described["recipe"]
        self.steps, self.evaluations = (
            newest_of_each_step(run_folder / name) for name in ("metrics.jsonl", "evaluations.jsonl")
        )
        self.attempts = [json.loads(line) for line in (run_folder / "attempts.jsonl").read_text().splitlines()]
        newest = max((root / described["paths"]["checkpoints"]).glob("step-*"))
        self.checkpoint = json.loads((newest / "manifest.json").read_text())["checkpoint"]

    def numbers(self) -> dict[str, float]:
        applied = [each for each in self.steps if math.isfinite(each["gradient_norm"])]
        mean = applied[-100:]
        batches = [mean[first : first + 10] for first in range(0, 100, 10)]
        means = [sum(each["loss"] for each in batch) / 10 for batch in batches]
        loss = sum(means) / 10
        error = math.sqrt(sum((each - loss) ** 2 for each in means) / 9 / 10)
        timed = [each for each in self.steps if not each["is_first_of_process"]]
        seconds = sum(each["step_seconds"] for each in timed)
        step_tokens = self.recipe["batch"]["global_batch_size"] * self.recipe["corpus"]["sequence_length"]
        known = [each for each in timed if "mfu" in each]
        known_seconds = sum(each["step_seconds"] for each in known)
        stalls = [each["checkpoint_stall_seconds"] for each in self.steps if "checkpoint_stall_seconds" in each]
        return {
            "step": len(self.steps),
            "tokens": len(applied) * step_tokens,
            "skipped_steps": len(self.steps) - len(applied),
            "first_loss": self.steps[0]["loss"],
            "loss": loss,
            "loss_standard_error": error,
            "loss_first_step": mean[0]["step"],
            "perplexity": math.e**loss,
            "tokens_per_second": step_tokens * len(timed) / seconds,
            "data_share": sum(each["data_seconds"] for each in timed) / seconds,
            "mfu": sum(each["mfu"] * each["step_seconds"] for each in known) / known_seconds,
            "training_seconds": sum(each["step_seconds"] for each in self.steps),
            "goodput": self.steps[-1]["goodput"],
            "checkpoint_stall_seconds": sum(stalls) / len(stalls),
            "graphs_compiled": sum(each["graphs_compiled"] for each in self.attempts),
        }


def give_sources(evaluations: Path) -> None:
    """Give each evaluation losses of SOURCES: the corpus of these tests names none."""
    lines = [json.loads(line) for line in evaluations.read_text().splitlines()]
    for line in lines:
        mean = {name: line[name] for name in ("standard_error", "tokens", "documents", "bits_per_byte", "perplexity")}
        line["sources"] = {name: {**mean, "loss": line["loss"] + n} for n, name in enumerate(SOURCES)}
    evaluations.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def job(new_shared_job: NewJob) -> Job:
    """Train a run that was killed after a checkpoint's steps were done again, and that skipped steps."""
    options = {"checkpoint__interval_steps": "25", "parallel__data_parallel_size": "1", "optimizer__decay_steps": "200"}
    options |= {"train__health_interval_steps": "50", "optimizer__max_grad_norm": "0.68"}
    with pytest.MonkeyPatch.context() as patch:
        work.poison(patch, *POISONED)
        first = train_new(new_shared_job, train__max_steps="61", **options)
        for step in (61, 75):
            shutil.rmtree(first.checkpoint_collection / f"step-{step:08d}", ignore_errors=True)
        second = train_new(new_shared_job, train__max_steps=str(STEPS), **options)
    give_sources(second.run_folder / "evaluations.jsonl")
    assert list(checkpoints(second.root))[-1] == f"step-{STEPS:08d}"
    return second


@pytest.fixture(scope="module")
def raw(job: Job) -> RawRun:
    assert len((job.run_folder / "metrics.jsonl").read_text().splitlines()) == STEPS + 61 - REPEATED_FROM
    return RawRun(job.run_folder, job.root)


@pytest.fixture(scope="module")
def pages(job: Job, new_shared_job: NewJob) -> list[Path]:
    """The report of the run with further events, and of one that has not done a step."""
    cause = "rank 1 <was killed> by SIGKILL " * 9
    record_event(job, "restart", from_step=60, cause=cause)
    record_event(job, "straggler", step=90, rank=1)
    record_event(job, "rollback", step=130, to_step=120, first_batch=125, last_batch=130)
    begun = new_shared_job("begun", train__max_steps="7")
    return [write_report(open_started_run(each.root, each.run)) for each in (job, begun)]


@pytest.fixture(scope="module")
def page(pages: list[Path]) -> str:
    return pages[0].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def test_the_numbers_of_the_report_are_those_of_the_raw_records(raw: RawRun, page: str) -> None:
    found = re.search(r'<script type="application/json" id="millrace-numbers">(.*?)</script>', page, re.DOTALL)
    assert found
    numbers, expected = json.loads(found[1]), raw.numbers()
    assert numbers.pop("evaluation") == raw.evaluations[-1]
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (expected["step"], expected["skipped_steps"]) == (STEPS, len(POISONED))
    assert raw.checkpoint["tokens"] == raw.steps[-1]["tokens"] == expected["tokens"]
    assert math.isnan(raw.steps[POISONED[0]]["loss"])
    applied = np.cumsum([math.isfinite(record["gradient_norm"]) for record in raw.steps])
    assert [record["tokens"] for record in raw.steps] == [count * raw.steps[0]["step_tokens"] for count in applied]


def test_the_curves_of_the_report_are_the_raw_records_over_steps_tokens_and_time(raw: RawRun, page: str) -> None:
    drawn, later = read_curves(page), [each for each in raw.steps if not each["is_first_of_process"]]
    expected: dict[tuple[str, str], list[tuple[int, float]]] = {
        ("loss", "training, each step"): [(each["step"], each["loss"]) for each in raw.steps],
        ("loss", "validation"): [(each["step"], each["loss"]) for each in raw.evaluations],
        ("throughput", "all workers, each step"): [(each["step"], each["tokens_per_second"]) for each in later],
        ("validation-by-source", SOURCES[1]): [
            (each["step"], each["sources"][SOURCES[1]]["loss"]) for each in raw.evaluations
        ],
        ("gradient-by-group", "head"): [
            (each["step"], each["gradient_norm_by_group"]["head"])
            for each in raw.steps
            if "gradient_norm_by_group" in each
        ],
    }
    for curve, points in expected.items():
        finite = [point for point in points if math.isfinite(point[1])]
        assert np.array(drawn[curve]) == pytest.approx(np.array(finite), rel=1e-5), curve
    [positions] = read_charts(page)["runs"]
    assert positions["steps"] == [record["step"] for record in raw.steps]
    assert positions["tokens"] == [record["tokens"] for record in raw.steps]
    seconds = [record["time"] - record["run_started_at"] for record in raw.steps]
    assert positions["seconds"] == pytest.approx(seconds, rel=1e-5)


def test_health_is_measured_at_the_interval_and_clipped_steps_are_those_above_the_limit(raw: RawRun) -> None:
    """The last step updated nothing, so it has no update and no gradient of groups."""
    measured = {record["step"]: record for record in raw.steps if "largest_logit" in record}
    assert list(measured) == [50, 100, STEPS]
    assert ["update_ratio_by_group" in record for record in measured.values()] == [True, True, False]
    limit = raw.recipe["optimizer"]["max_grad_norm"]
    # The second process began after step REPEATED_FROM, so its first share does not count the first process's steps.
    for first, last in ((51, 100), (101, STEPS)):
        norms = [record["gradient_norm"] for record in raw.steps[first - 1 : last]]
        applied = [norm for norm in norms if math.isfinite(norm)]
        share = sum(norm > limit for norm in applied) / len(applied)
        assert raw.steps[last - 1]["clipped_share"] == pytest.approx(share, rel=1e-12)
        assert 0 < share < 1
    for step in (50, 100):
        whole = math.hypot(*measured[step]["gradient_norm_by_group"].values())
        assert whole == pytest.approx(measured[step]["gradient_norm"], rel=1e-6)


def test_a_report_is_small_complete_and_says_what_happened(pages: list[Path]) -> None:
    trained, begun = (page.read_text(encoding="utf-8") for page in pages)
    assert len(trained) < 600_000
    assert len(begun) < 100_000
    assert set(read_charts(trained)["marks"]) == {"restart", "skipped", "checkpoint", "straggler", "rollback"}
    assert "rank 1 &lt;was killed&gt; by SIGKILL" in trained
    assert "<figure" not in begun
    for page in (trained, begun):  # asks for no other file
        assert not re.findall(r'(?:src|href)="(?!data:|#)|url\(|@import|fetch\(|XMLHttpRequest', page)


@pytest.mark.parametrize(("overrides", "family"), [({}, "Llama"), (QWEN_3, "Qwen3")])
def test_a_report_begins_with_what_was_trained_and_has_no_tile_without_a_value(
    new_job: NewJob, overrides: dict[str, str], family: str
) -> None:
    """A CPU has neither a price nor chip-hours, and this run was not evaluated."""
    job = train_new(new_job, train__max_steps="2", train__evaluation_tokens="0", **overrides)
    page = write_report(open_started_run(job.root, job.run)).read_text(encoding="utf-8")
    first = re.search(r"<header><p>(.*?)</p>", page)
    assert first
    parameters = f"{job.recipe.model.num_parameters / 1e3:.3g}k parameters"
    for word in (family, parameters, "256 tokens", job.recipe.corpus.name, "tokenizer.model", "300 pieces"):
        assert word in first[1]
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>([^<]*)", page))
    assert {"State", "Training loss", "Tokens seen"} <= tiles.keys()
    assert not {"Cost so far", "Chip-hours", "Validation loss", "Time left"} & tiles.keys()


BESIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CHOOSE = "document.getElementById({!r}).click()"
DRAWN = "document.querySelectorAll('figure .plot canvas').length"


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_all_charts_are_drawn_within_the_page(pages: list[Path], browser: Browser, width: int) -> None:
    for page, num_charts in zip(pages, [len(read_charts(pages[0].read_text())["charts"]), 0], strict=True):
        browser.open(page, width, 900)
        assert browser.evaluate(DRAWN) == browser.evaluate("document.querySelectorAll('figure').length") == num_charts
        assert browser.evaluate(BESIDE) <= 0
        for choice in ("x-log", "y-logarithmic", "x-tokens", "x-time") if num_charts else ():
            browser.evaluate(CHOOSE.format(choice))
            assert browser.evaluate(DRAWN) == num_charts
        assert browser.evaluate(BESIDE) <= 0
        assert requests_and_complaints(browser) == []


def requests_and_complaints(browser: Browser) -> list[str]:
    """Return the requests of the page besides the one for itself, and what it has written to the console."""
    events = [(event.get("method"), event.get("params", {})) for event in browser.events]
    requests = [params["request"]["url"] for method, params in events if method == "Network.requestWillBeSent"]
    complaints = [
        str(params)
        for method, params in events
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    ]
    return [url for url in requests[1:] if not url.startswith("data:")] + complaints


@needs_browser
@needs_axe
@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_serious(pages: list[Path], browser: Browser, is_dark: bool) -> None:
    axe = Path(str(importlib.util.find_spec("axe_core_python").origin)).with_name("axe.min.js")  # type: ignore[union-attr]
    options = "{ resultTypes: ['violations'], runOnly: ['color-contrast'] }" if is_dark else "{}"
    for page in pages[:1] if is_dark else pages:
        browser.open(page, 1280, 900, is_dark=is_dark)
        browser.evaluate(axe.read_text(encoding="utf-8") + ";0")
        found = browser.evaluate(f"axe.run(document, {options}).then(found => found.violations)")
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(each["id"], [node["html"] for node in each["nodes"][:3]]) for each in serious] == []


LOSS, SMOOTH_LOSS = Series("loss", "training"), Series("loss", "training", is_smooth=True)


def collect(losses: list[float]) -> RunCurves:
    curves = RunCurves()
    for step in reversed(range(len(losses))):
        curves.add({**STEP, "step": step, "loss": losses[step]})
    return curves


@pytest.mark.parametrize("num_steps", [1, MAX_POINTS + 1, 10_000])
def test_a_curve_keeps_few_points_and_all_extremes(num_steps: int) -> None:
    source = random.Random(num_steps)
    losses = [round(source.gauss(3.0, 1.0), 4) for _ in range(num_steps)]

    [curve] = collect(losses).draw(LOSS)

    assert len(curve.steps) <= MAX_POINTS
    assert curve.steps == sorted(set(curve.steps))
    assert curve.values == [losses[step] for step in curve.steps]
    assert (curve.steps[0], curve.steps[-1]) == (0, num_steps - 1)
    for start in range(0, num_steps, 100):  # a spike anywhere is kept
        spike = max(range(start, min(start + 100, num_steps)), key=losses.__getitem__)
        kept = [value for step, value in zip(curve.steps, curve.values, strict=True) if abs(step - spike) <= 40]
        assert max(kept) >= losses[spike]
    assert (min(curve.values), max(curve.values)) == (min(losses), max(losses))


def test_a_moving_mean_of_a_line_is_the_line_and_non_finite_values_are_left_out() -> None:
    losses = [2.0 * step for step in range(1_000)]
    faint, mean = collect(losses).draw(SMOOTH_LOSS)
    assert (faint.is_faint, mean.is_faint) == (True, False)
    assert mean.name == "training, mean of 25 steps"
    assert mean.values[20:-20] == pytest.approx(losses[20:-20])

    [curve] = collect([1.0, math.nan, math.inf, 2.0]).draw(SMOOTH_LOSS)
    assert (curve.steps, curve.values) == ([0, 3], [1.0, 2.0])
    assert list(RunCurves().draw(LOSS)) == []


def test_the_page_does_not_grow_with_the_steps() -> None:
    sizes = []
    for num_steps in (6_000, 12_000):
        curves = RunCurves()
        for record in make_steps(num_steps, every=5):
            groups = {f"group {number:03}": 1.0 for number in range(2 * MAX_LABELS)} if record["step"] < 50 else {}
            curves.add(record | {"update_ratio_by_group": groups})
        drawn = {name: [each for series in chart for each in curves.draw(series)] for name, chart in CHARTS.items()}
        assert len(drawn["update-by-group"]) == MAX_LABELS
        assert len(curves.positions()["steps"]) <= MAX_POINTS
        assert max(len(steps) for steps in curves.marks().values()) <= MAX_MARKS
        sizes.append(len(str(drawn)))
    assert sizes[1] < 1.1 * sizes[0] < 600_000
