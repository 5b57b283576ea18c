"""The report in a browser: all charts drawn, nothing beside the page, no request, nothing that axe-core finds."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.testing.browser import Browser, find_browser
from services.trainer.job import Job
from services.trainer.metrics.commands import COMMANDS_FILE
from services.trainer.report.run_report import write_report
from services.trainer.run import open_started_run
from services.trainer.tests.drawn import read_charts
from services.trainer.tests.metric_lines import BEGAN, append, make_command

STEPS = 2_400
KILLED_AT = (700, 1_500)
GROUPS = ("embedding", "layers 0-0", "layers 1-1", "head", "norms")
SOURCES = ("hf://a/very-long-name-of-a-data-set-that-people-have", "text/b.jsonl.gz")
LARGEST_BYTES = 600_000
NUM_CHARTS = 20

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")
needs_axe = pytest.mark.skipif(importlib.util.find_spec("axe_core_python") is None, reason="no axe-core-python")


def make_steps(num_steps: int, every: int = 100) -> Iterator[dict[str, Any]]:
    """Yield the records of a run with two workers that was killed at KILLED_AT and skipped two steps."""
    source, began = random.Random(0), 1_790_000_000.0
    restarts = 0
    for step in range(1, num_steps + 1):
        is_first = step == 1 or step - 1 in KILLED_AT
        restarts += is_first and step > 1
        is_skipped = step in (40, 1_200)
        loss = math.nan if is_skipped else 2.0 + 6.4 * step**-0.25 + source.gauss(0, 0.05)
        seconds = 4.0 if is_first else 0.4 + abs(source.gauss(0, 0.03))
        record = {
            "step": step,
            "loss": loss,
            "loss_max": loss + 0.2,
            "gradient_norm": math.inf if is_skipped else 0.6 + 3 / step + abs(source.gauss(0, 0.1)),
            "learning_rate": 4e-3 * min(1.0, step / 100),
            "step_seconds": seconds,
            "data_seconds": 0.001,
            "data_share": 0.001 / seconds,
            "gradient_seconds_spread": abs(source.gauss(0, 0.02)),
            "straggler_score": 1.05,
            "slowest_rank": 0.0,
            "skipped_steps": (step >= 40) + (step >= 1_200),
            "is_first_of_process": is_first,
            "time": began + 0.45 * step + 60.0 * restarts,
            "run_started_at": began,
            "step_tokens": 2_048,
            "tokens": 2_048 * (step - (step >= 40) - (step >= 1_200)),
            "tokens_per_second": 2_048 / seconds,
            "peak_rss_bytes": 7e8 + 1e5 * math.sqrt(step),
            "goodput": 0.9,
            "restarts": restarts,
            **({} if is_first else {"mfu": 0.2 / seconds, "mfu_causal": 0.19 / seconds}),
        }
        if step % every == 0:
            record |= {
                "checkpoint_stall_seconds": 0.02,
                "clipped_share": 0.1,
                "largest_logit": 12.0 + source.random(),
                "activation_rms": 4.0,
                "gradient_norm_by_group": {group: 0.1 + source.random() / 5 for group in GROUPS},
                "update_ratio_by_group": {group: 1e-3 * (1 + source.random()) for group in GROUPS},
            }
        yield record


def write_records(run_folder: Path) -> None:
    """Write the records of a run that two kills interrupted, each of which lost some steps."""
    steps = list(make_steps(STEPS))
    lost = [step for end in KILLED_AT for step in steps[end : end + 7]]
    lines = [*steps[: KILLED_AT[0]], *lost[:7], *steps[KILLED_AT[0] : KILLED_AT[1]], *lost[7:], *steps[KILLED_AT[1] :]]
    append(run_folder / "metrics.jsonl", b"\n".join(json.dumps(line).encode() for line in lines))
    for number in range(13):
        mean = {"loss": 9.0 / (1 + number) ** 0.3, "standard_error": 0.1, "tokens": 900, "documents": 9}
        mean |= {"bits_per_byte": 2.0, "perplexity": 80.0}
        sources = {name: {**mean, "loss": mean["loss"] + place} for place, name in enumerate(SOURCES)}
        line = {"step": 200 * number, "time": 1.0, "corpus": "c", "seconds": 0.5, **mean, "sources": sources}
        append(run_folder / "evaluations.jsonl", json.dumps(line).encode())
    for number in range(2):
        attempt: dict[str, Any] = {
            "started_at": 1_790_000_000.0 + 500 * number,
            "setup_seconds": 3.0,
            "train_seconds": 300.0,
        }
        attempt |= {"graphs_compiled": 0, "new_cache_files": 0, "workers": 2, "launch": "inline", "ended_by": "stop"}
        append(run_folder / "attempts.jsonl", json.dumps(attempt).encode())
    for command in (make_command(0, 400), make_command(500, 1_500, ended_at=1_790_001_500.0, exit_code=0)):
        append(run_folder / COMMANDS_FILE, command.model_dump_json().encode())
    events: list[dict[str, Any]] = [
        *(
            {"event": "restart", "from_step": step, "cause": "rank 1 <was killed> by SIGKILL " * 9}
            for step in KILLED_AT
        ),
        {"event": "straggler", "step": 900, "rank": 1},
        {"event": "rollback", "step": 2_000, "to_step": 1_900, "first_batch": 1_950, "last_batch": 2_000},
    ]
    for event in events:
        append(run_folder / "events.jsonl", json.dumps({"time": 1_790_000_300.0, **event}).encode())


@pytest.fixture(scope="module")
def pages(new_shared_job: Callable[..., Job]) -> list[Path]:
    """The report of a run that was killed twice, and of one that has not done a step. Neither has a checkpoint."""
    killed, begun = new_shared_job("killed"), new_shared_job("begun", train__max_steps="7")
    write_records(killed.run_folder)
    return [write_report(open_started_run(job.root, job.run)) for job in (killed, begun)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def test_a_report_is_small_and_says_what_happened(pages: list[Path]) -> None:
    killed, begun = (page.read_text(encoding="utf-8") for page in pages)
    assert len(killed) < LARGEST_BYTES
    assert len(begun) < 100_000
    assert set(read_charts(killed)["marks"]) == {"restart", "skipped", "checkpoint", "straggler", "rollback"}
    assert "rank 1 &lt;was killed&gt; by SIGKILL" in killed
    assert killed.count("killed, or its node was lost") == killed.count("<td>exit code 0</td>") == 1
    assert "<figure" not in begun
    assert "none yet" in begun


def test_a_page_asks_for_no_other_file(pages: list[Path]) -> None:
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|href)="(?!data:|#)|url\(|@import|fetch\(|XMLHttpRequest', text)


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
    for page, num_charts in zip(pages, [NUM_CHARTS, 0], strict=True):
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
    assert " at 1,2" in browser.evaluate("document.querySelector('#loss .legend').textContent")
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


@needs_browser
def test_a_printed_report_is_light_and_shows_all_of_its_tables(pages: list[Path], browser: Browser) -> None:
    browser.open(pages[0], 800, 900, is_dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("[...document.querySelectorAll('.choice')].some(each => each.checkVisibility())") is False
    assert browser.evaluate(BESIDE) <= 0
