"""TensorBoard, Prometheus and W&B show every step, and their failures do not end a run."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.proto.event_pb2 import Event

from services.common.errors import DeviceError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.common.process.stage_metrics import PREFIX
from services.trainer.health.silence import forget_heartbeats, write_heartbeat
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import record_event
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS
from services.trainer.metrics.prometheus import RunCollector
from services.trainer.metrics.recorder import MetricsWriter
from services.trainer.metrics.records import METRICS_FILE, read_metrics
from services.trainer.metrics.trackers import require_trackers, tracking
from services.trainer.stop import request_stop
from services.trainer.tests.metric_lines import STEP, append

ALONE = WorkerEnvironment(rank=0, world_size=1)


def events_in(folder: Path) -> Iterator[Event]:
    """Yield the events that TensorBoard reads from the files of a run."""
    for path in sorted(folder.iterdir()):
        content, position = path.read_bytes(), 0
        while position < len(content):
            (size,) = struct.unpack_from("<Q", content, position)
            yield Event.FromString(content[position + 12 : position + 12 + size])
            position += 12 + size + 4


def scalars_in(folder: Path) -> dict[int, dict[str, float]]:
    return {
        event.step: {value.tag: value.simple_value for value in event.summary.value}
        for event in events_in(folder)
        if event.summary.value
    }


def scrape(collector: RunCollector) -> dict[str, dict[str, float]]:
    """Return the values of each metric by the value of its label, which is empty if the metric has none."""
    registry = CollectorRegistry()
    registry.register(collector)
    labels = {metric.name: metric.label for metric in (*METRICS, *RUN_METRICS)}
    found = dict[str, dict[str, float]]()
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        full_name = family.name + ("_total" if family.type == "counter" else "")
        samples = [each for each in family.samples if each.name == full_name]  # a counter has its creation, too
        name = full_name.removeprefix(PREFIX)
        assert all(set(each.labels) == {"run", labels[name]} - {None} for each in samples)
        found[name] = {each.labels.get(labels[name] or "", ""): each.value for each in samples}
    return found


def test_tensorboard_shows_every_step_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({"step": step, "loss": 4.0 / step, "note": 1})
        assert scalars_in(tmp_path / "tensorboard") == {each: {"loss": 4.0 / each} for each in range(1, step + 1)}
    writer.close()
    assert next(events_in(tmp_path / "tensorboard")).file_version == "brain.Event:2"


def test_a_failed_write_of_tensorboard_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("not a folder")
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({**STEP, "step": step})
    writer.close()

    assert [record["step"] for record in read_metrics(tmp_path).lines] == [1, 2]
    assert len(caplog.records) == 1


def test_a_labelled_metric_is_an_object_in_the_file_and_a_series_for_each_value_in_the_views(
    new_job: Callable[..., Job],
) -> None:
    job, name, strange = new_job(), "gradient_norm_by_group", 'a "quoted\\path"\nof two lines, {braces} = ä'
    collector = RunCollector(job)
    writer = MetricsWriter(job.run_folder, first_step=0)
    writer.log({**STEP, "step": 1, name: {"embedding": 1.0, strange: 3.0}})
    before = scrape(collector)
    writer.log({**STEP, "step": 2})
    writer.log({**STEP, "step": 3, name: {"embedding": 2.0}})
    writer.close()
    after = scrape(collector)

    shown = {
        step: {tag: value for tag, value in values.items() if name in tag}
        for step, values in scalars_in(job.run_folder / "tensorboard").items()
    }
    assert shown == {1: {f"{name}/embedding": 1.0, f"{name}/{strange}": 3.0}, 2: {}, 3: {f"{name}/embedding": 2.0}}
    assert (before[name], after[name]) == ({"embedding": 1.0, strange: 3.0}, {"embedding": 2.0})
    assert after["update_ratio_by_group"] == {}


def test_a_scrape_during_training_has_every_metric_that_the_readme_names(new_job: Callable[..., Job]) -> None:
    job = new_job(
        parallel__data_parallel_size="1",
        train__max_steps="100000",
        train__evaluation_interval_steps="2",
        train__health_interval_steps="2",
        checkpoint__interval_steps="2",
    )
    collector, has_ended, found = RunCollector(job), threading.Event(), dict[str, dict[str, float]]()

    def scrape_until_a_checkpoint_is_committed() -> None:
        is_committed = False
        while not has_ended.wait(0.05) and not is_committed:
            found.update(scrape(collector))
            is_committed = found["step"][""] >= 3 and found["checkpoint_step"][""] >= 2
        request_stop(job.run_folder, StopReason.STOP_FILE)

    scraper = threading.Thread(target=scrape_until_a_checkpoint_is_committed)
    scraper.start()
    try:
        with pytest.raises(TryAgain):
            train(job, ALONE)
    finally:
        has_ended.set()
        scraper.join()

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    assert rows == [[f"`{each.field}`", each.unit, each.reduction, each.help] for each in METRICS]
    assert list(found) == [each.name for each in (*METRICS, *RUN_METRICS)]
    assert {name for name, values in found.items() if all(map(math.isnan, values.values()))} == {
        *("slowest_rank", "straggler_score", "peak_device_bytes"),  # of one worker, on a CPU
        "validation_loss_by_source",  # the corpus has none
    }


def test_a_scrape_tells_the_times_of_a_runs_steps_checkpoints_and_heartbeats(new_job: Callable[..., Job]) -> None:
    job = new_job(parallel__data_parallel_size="2", train__max_steps="40", checkpoint__interval_steps="10")

    def beat(rank: int, age_seconds: float) -> None:
        write_heartbeat(job.run_folder, {"rank": rank})
        at = time.time() - age_seconds
        os.utime(job.run_folder / "heartbeats" / f"rank-{rank:05d}.json", (at, at))

    def read(name: str, label: str = "") -> float:
        return scrape(collector)[name][label]

    append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
    record_event(replace(job, attempt="an earlier command"), "restart", restarts=1)
    collector = RunCollector(job)
    assert read("events_total", "restart") == read("checkpoint_step") == 0
    assert math.isnan(read("last_step_time_seconds"))
    assert math.isnan(read("heartbeat_age_seconds"))

    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 4, "time": 1.7e9}).encode())
    record_event(job, "nan", cause="data")
    beat(0, 1)
    beat(1, 93)
    assert read("heartbeat_age_seconds") == pytest.approx(93, abs=30)
    assert read("last_step_time_seconds") == 1.7e9
    assert (read("events_total", "nan"), read("events_total", "restart")) == (1, 0)

    forget_heartbeats(job.run_folder)
    assert math.isnan(read("heartbeat_age_seconds"))
    folder = job.checkpoint_collection / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (900, 900))
    assert (read("checkpoint_step"), read("checkpoint_time_seconds")) == (10, 900)
    assert (read("checkpoint_interval_steps"), read("max_steps")) == (10, 40)


def test_a_tracker_that_is_not_installed_ends_the_command_at_start() -> None:
    with pytest.raises(DeviceError):
        require_trackers(["no_such_tracker"])


@pytest.mark.parametrize(("fails", "logged"), [(False, [1, 2, 3]), (True, [])])
def test_wandb_gets_every_new_record_and_its_failure_ends_nothing(
    new_job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
    logged: list[int],
) -> None:
    steps, ended_with = list[float](), list[int]()

    class FakeRun:
        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, values: dict[str, float]) -> None:
            if fails:
                raise ConnectionError("the network is gone")
            steps.append(values["step"])

        def finish(self, exit_code: int) -> None:
            ended_with.append(exit_code)

    fake = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None, origin="fake")
    fake.init = lambda **_: FakeRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 1}).encode())

    def train_until_stopped() -> None:
        with tracking(job, ["wandb"]):
            train(job, ALONE)
            raise TryAgain("stopped")

    with pytest.raises(TryAgain):
        train_until_stopped()

    assert (steps, ended_with) == (logged, [] if fails else [TryAgain.exit_code])
