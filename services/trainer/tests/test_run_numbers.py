"""Every number that the summary and the report show is computed again from the run's files.

The recomputation reads the JSON lines and manifests with the standard library alone, and shares no code with the
report: it imports nothing of it but the calls that make the texts.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.launch.launcher import WorkerEnvironment
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.report.run_report import write_report
from services.trainer.run import open_run
from services.trainer.tests import work
from services.trainer.tests.drawn import read_charts, read_curves
from services.trainer.tests.runs import checkpoints

ALONE = WorkerEnvironment(rank=0, world_size=1)
STEPS = 137
REPEATED_FROM = 50
POISONED = (20, 80, 136)
"""Numbers of the steps whose gradients are not finite; the last of them is the run's last step."""

SOURCES = ("hf://a", "<!--<script>b.txt")
CURVES = {
    ("loss", "training, each step"): ("steps", "loss"),
    ("loss", "validation"): ("evaluations", "loss"),
    ("bits-per-byte", "validation"): ("evaluations", "bits_per_byte"),
    ("worst-micro-batch", "worst micro-batch, each step"): ("steps", "loss_max"),
    ("gradient-norm", "gradient, each step"): ("steps", "gradient_norm"),
    ("learning-rate", "learning rate"): ("steps", "learning_rate"),
    ("clipped", "clipped steps"): ("steps", "clipped_share"),
    ("largest-logit", "largest logit"): ("steps", "largest_logit"),
    ("activations", "activations"): ("steps", "activation_rms"),
    ("throughput", "all workers, each step"): ("steps", "tokens_per_second"),
    ("mfu", "PaLM's convention, each step"): ("steps", "mfu"),
    ("mfu", "causal attention counted once, each step"): ("steps", "mfu_causal"),
    ("goodput", "goodput"): ("steps", "goodput"),
    ("step-time", "slowest worker, each step"): ("steps", "step_seconds"),
    ("data-wait", "share of a step, each step"): ("steps", "data_share"),
    ("checkpoint-stall", "stop"): ("steps", "checkpoint_stall_seconds"),
    ("evaluation-time", "evaluation"): ("evaluations", "seconds"),
    ("memory", "host memory"): ("steps", "peak_rss_bytes"),
}
"""File and field of each curve of the report, by its chart and name."""
OF_LATER_STEPS = ("tokens_per_second", "step_seconds", "data_share")
"""Metrics whose curve leaves out the first step of a process, which loads or compiles the graphs."""
OF_SOURCES = [("validation-by-source", source) for source in SOURCES]
OF_GROUPS = {
    (chart, group): metric
    for chart, metric in (
        ("gradient-by-group", "gradient_norm_by_group"),
        ("update-by-group", "update_ratio_by_group"),
    )
    for group in ("embedding", "layers 0-0", "layers 1-1", "head", "norms")
}


class RawRun:
    """A run's numbers, computed from its files."""

    def __init__(self, run_folder: Path, root: Path) -> None:
        described = json.loads((run_folder / "run.json").read_text())
        self.recipe = described["recipe"]
        self.corpus = json.loads((root / described["paths"]["corpus"] / "manifest.json").read_text())["corpus"]
        steps: dict[int, dict[str, Any]] = {}
        for line in (run_folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            steps[record["step"]] = record
        self.steps = [steps[step] for step in sorted(steps)]
        evaluations = {}
        for line in (run_folder / "evaluations.jsonl").read_text().splitlines():
            record = json.loads(line)
            evaluations[record["step"]] = record
        self.evaluations = [evaluations[step] for step in sorted(evaluations)]
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
            "first_step": 1,
            "first_loss": self.steps[0]["loss"],
            "loss": loss,
            "loss_standard_error": error,
            "loss_first_step": mean[0]["step"],
            "loss_last_step": mean[-1]["step"],
            "loss_steps": 100,
            "perplexity": math.e**loss,
            "tokens_per_second": step_tokens * len(timed) / seconds,
            "data_share": sum(each["data_seconds"] for each in timed) / seconds,
            "mfu": sum(each["mfu"] * each["step_seconds"] for each in known) / known_seconds,
            "mfu_causal": sum(each["mfu_causal"] * each["step_seconds"] for each in known) / known_seconds,
            "training_seconds": sum(each["step_seconds"] for each in self.steps),
            "goodput": self.steps[-1]["goodput"],
            "restarts": self.steps[-1]["restarts"],
            "checkpoint_stall_seconds": sum(stalls) / len(stalls),
            "slowest_checkpoint_seconds": max(each["slowest_checkpoint_seconds"] for each in self.attempts),
            "graphs_compiled": sum(each["graphs_compiled"] for each in self.attempts),
            "new_cache_files": sum(each["new_cache_files"] for each in self.attempts),
        }

    def points(self, chart: str, name: str) -> list[tuple[int, float]]:
        """Return steps and values of a curve of the report."""
        if (chart, name) in CURVES:
            kind, metric = CURVES[chart, name]
            records, label = self.evaluations if kind == "evaluations" else self.steps, None
        elif (chart, name) in OF_GROUPS:
            records, metric, label = self.steps, OF_GROUPS[chart, name], name
        else:
            records, metric, label = (
                [each["sources"][name] | {"step": each["step"]} for each in self.evaluations],
                "loss",
                None,
            )
        known = [each for each in records if metric in each]
        if metric in OF_LATER_STEPS:
            known = [each for each in known if not each["is_first_of_process"]]
        values = [(each["step"], each[metric][label] if label else each[metric]) for each in known]
        return [(step, value) for step, value in values if math.isfinite(value)]

    def flops_per_token(self) -> tuple[float, float]:
        """Return the FLOP of a token with all scores of attention, and with those below the diagonal."""
        model, length = self.recipe["model"], self.recipe["corpus"]["sequence_length"]
        hidden, heads = model["hidden_size"], model["num_attention_heads"]
        kv_width = model["num_key_value_heads"] * hidden // heads
        matrices = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * model["intermediate_size"]
        norms = model["num_hidden_layers"] * 2 * hidden + hidden
        parameters = model["num_hidden_layers"] * matrices + norms + model["vocab_size"] * hidden  # the head's
        scores = 12 * model["num_hidden_layers"] * heads * (hidden // heads) * length
        return 6 * parameters + scores, 6 * parameters + scores / 2


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
        first = new_shared_job(train__max_steps="61", **options)
        train(first, ALONE)
        for step in (61, 75):
            shutil.rmtree(first.checkpoint_collection / f"step-{step:08d}", ignore_errors=True)
        second = new_shared_job(train__max_steps=str(STEPS), **options)
        train(second, ALONE)
    give_sources(second.run_folder / "evaluations.jsonl")
    assert list(checkpoints(second.root))[-1] == f"step-{STEPS:08d}"
    return second


@pytest.fixture(scope="module")
def raw(job: Job) -> RawRun:
    raw = RawRun(job.run_folder, job.root)
    lines = (job.run_folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS + 61 - REPEATED_FROM
    return raw


@pytest.fixture(scope="module")
def page(job: Job) -> str:
    return write_report(open_run(job.root, job.run)).read_text(encoding="utf-8")


def test_the_numbers_of_the_report_are_those_of_the_raw_records(raw: RawRun, page: str) -> None:
    found = re.search(r'<script type="application/json" id="millrace-numbers">(.*?)</script>', page, re.DOTALL)
    assert found
    numbers, expected = json.loads(found[1]), raw.numbers()
    assert numbers.pop("evaluation") == raw.evaluations[-1]
    assert numbers == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}
    assert (expected["step"], expected["skipped_steps"]) == (STEPS, len(POISONED))
    assert raw.checkpoint["tokens"] == raw.steps[-1]["tokens"] == expected["tokens"]
    assert math.isnan(raw.steps[POISONED[0]]["loss"])


def test_the_curves_of_the_report_are_the_raw_records_over_steps_tokens_and_time(raw: RawRun, page: str) -> None:
    drawn = read_curves(page)
    expected = [*CURVES, *OF_SOURCES, *OF_GROUPS]
    assert set(expected) == {curve for curve in drawn if "mean of" not in curve[1]}
    for curve in expected:
        points = raw.points(*curve)
        assert [step for step, _ in drawn[curve]] == [step for step, _ in points]
        assert [value for _, value in drawn[curve]] == pytest.approx([value for _, value in points], rel=1e-5), curve
    [positions] = read_charts(page)["runs"]
    assert positions["steps"] == [record["step"] for record in raw.steps]
    assert positions["tokens"] == [record["tokens"] for record in raw.steps]
    seconds = [record["time"] - record["run_started_at"] for record in raw.steps]
    assert positions["seconds"] == pytest.approx(seconds, rel=1e-5)


def test_tokens_of_records_leave_out_skipped_steps(raw: RawRun) -> None:
    applied = 0
    for record in raw.steps:
        applied += math.isfinite(record["gradient_norm"])
        assert record["tokens"] == applied * record["step_tokens"]


def test_both_utilizations_are_of_the_same_speed(raw: RawRun) -> None:
    palm, causal = raw.flops_per_token()
    known = [record for record in raw.steps if "mfu" in record]
    assert known
    for record in known:
        assert record["mfu"] / record["mfu_causal"] == pytest.approx(palm / causal, rel=1e-12)


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
