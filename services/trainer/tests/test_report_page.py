"""The report: every number is computed again from the run's files, and in a browser all charts are drawn.

The recomputation reads the JSON lines and manifests with the standard library alone, and shares no code with the
report: it imports nothing of it but the calls that make the texts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.testing.browser import Browser, find_browser
from services.trainer.job import Job
from services.trainer.metrics.commands import COMMANDS_FILE
from services.trainer.metrics.events import record_event
from services.trainer.report.run_report import write_report
from services.trainer.runs.run import open_started_run
from services.trainer.tests import work
from services.trainer.tests.builders import train_new
from services.trainer.tests.drawn import read_charts, read_curves
from services.trainer.tests.metric_lines import BEGAN, append, make_command
from services.trainer.tests.runs import checkpoints

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
def job(new_shared_job: Callable[..., Job]) -> Job:
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
def pages(job: Job, new_shared_job: Callable[..., Job]) -> list[Path]:
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


def test_the_report_of_a_running_run_says_so(new_job: Callable[..., Job]) -> None:
    job = new_job()
    command = make_command(2_000, time.time() - BEGAN)
    append(job.run_folder / COMMANDS_FILE, command.model_dump_json().encode())
    page = write_report(open_started_run(job.root, job.run)).read_text(encoding="utf-8")
    assert "<dd>running" in page
    assert "<td>it runs</td>" in page


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
def test_the_pointer_shows_the_value_below_it_and_the_keyboard_reaches_the_choices(
    pages: list[Path], browser: Browser
) -> None:
    browser.open(pages[0], 1280, 900)
    browser.evaluate("document.querySelector('#loss').scrollIntoView({ behavior: 'instant' })")
    box = browser.evaluate("document.querySelector('#loss .u-over').getBoundingClientRect().toJSON()")
    x, y = box["left"] + box["width"] / 2, box["top"] + box["height"] / 2
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    assert " at 6" in browser.evaluate("document.querySelector('#loss .legend').textContent")
    for _ in range(2):  # the link to the content, then the first choice
        for kind in ("keyDown", "keyUp"):
            browser.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.evaluate("document.activeElement.id") == "x-step"


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
