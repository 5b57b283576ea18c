"""TensorBoard, Prometheus and W&B show every step, and their failures do not end a run."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from tensorboardX.proto.event_pb2 import Event

from services.common.errors import TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.stage_metrics import PREFIX
from services.trainer.health.heartbeats import forget_heartbeats, write_heartbeat
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import record_event
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS
from services.trainer.metrics.prometheus import RunCollector
from services.trainer.metrics.recorder import MetricsWriter
from services.trainer.metrics.records import METRICS_FILE, read_metrics
from services.trainer.metrics.trackers import tracking
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
    labels = {metric.name: metric.label for metric in (*METRICS, *RUN_METRICS)}
    found: dict[str, dict[str, float]] = {name: {} for name in labels}
    for family in collector.collect():
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            assert set(sample.labels) == {"run", labels[name]} - {None}
            found[name][sample.labels.get(labels[name] or "", "")] = sample.value
    return found


def test_tensorboard_shows_every_step_as_soon_as_it_is_logged_and_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({"step": step, "loss": 4.0 / step, "note": 1})
        assert scalars_in(tmp_path / "tensorboard") == {each: {"loss": 4.0 / each} for each in range(1, step + 1)}
    writer.close()
    assert next(events_in(tmp_path / "tensorboard")).file_version == "brain.Event:2"

    (tmp_path / "other").mkdir()
    (tmp_path / "other/tensorboard").write_text("not a folder")
    failing = MetricsWriter(tmp_path / "other", first_step=0)
    for step in (1, 2):
        failing.log({**STEP, "step": step})
    failing.close()
    assert [record["step"] for record in read_metrics(tmp_path / "other").lines] == [1, 2]
    assert len(caplog.records) == 1


def test_a_labelled_metric_is_an_object_in_the_file_and_a_series_for_each_value_in_the_views(
    new_job: Callable[..., Job],
) -> None:
    job, name, strange = new_job(), "gradient_norm_by_group", 'a "quoted\\path"\nof two lines, {braces} = ä'
    collector, writer = RunCollector(job), MetricsWriter(job.run_folder, first_step=0)
    writer.log({**STEP, "step": 1, name: {"embedding": 1.0, strange: 3.0}})
    assert scrape(collector)[name] == {"embedding": 1.0, strange: 3.0}
    writer.log({**STEP, "step": 2, name: {"embedding": 2.0}})
    writer.close()
    assert scrape(collector)[name] == {"embedding": 2.0}

    scalars = scalars_in(job.run_folder / "tensorboard")
    shown = [{tag: value for tag, value in scalars[step].items() if name in tag} for step in (1, 2)]
    assert shown == [{f"{name}/embedding": 1.0, f"{name}/{strange}": 3.0}, {f"{name}/embedding": 2.0}]


def test_a_scrape_of_a_run_has_every_metric_that_the_readme_names(new_job: Callable[..., Job]) -> None:
    intervals = dict.fromkeys(("train__evaluation_interval_steps", "train__health_interval_steps"), "2")
    job = new_job(parallel__data_parallel_size="1", train__max_steps="4", checkpoint__interval_steps="2", **intervals)
    collector = RunCollector(job)
    train(job, ALONE)
    found = scrape(collector)

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    assert rows == [[f"`{each.field}`", each.unit, each.reduction, each.help] for each in METRICS]
    assert {name for name, values in found.items() if all(map(math.isnan, values.values()))} == {
        *("slowest_rank", "straggler_score", "peak_device_bytes"),  # of one worker, on a CPU
        "validation_loss_by_source",  # the corpus has none
    }


def test_a_scrape_tells_the_times_of_a_runs_steps_checkpoints_and_heartbeats(new_job: Callable[..., Job]) -> None:
    job = new_job(parallel__data_parallel_size="2", train__max_steps="40", checkpoint__interval_steps="10")
    collector = RunCollector(job)

    def read(*names: str) -> list[float]:
        found = scrape(collector)
        return [found[name][""] for name in names]

    assert read("checkpoint_step", "checkpoint_interval_steps", "max_steps") == [0, 10, 40]
    assert all(map(math.isnan, read("last_step_time_seconds", "heartbeat_age_seconds")))

    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 4, "time": 1.7e9}).encode())
    record_event(job, "nan", cause="data")
    for rank, age_seconds in enumerate((1, 93)):
        write_heartbeat(job.run_folder, {"rank": rank})
        at = time.time() - age_seconds
        os.utime(job.run_folder / "heartbeats" / f"rank-{rank:05d}.json", (at, at))
    folder = job.checkpoint_collection / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (900, 900))

    times = read("heartbeat_age_seconds", "last_step_time_seconds", "checkpoint_step", "checkpoint_time_seconds")
    assert times == [pytest.approx(93, abs=30), 1.7e9, 10, 900]
    assert scrape(collector)["events_total"]["nan"] == 1
    forget_heartbeats(job.run_folder)
    assert math.isnan(*read("heartbeat_age_seconds"))


@pytest.mark.parametrize("fails", [False, True])
def test_wandb_gets_every_new_record_and_its_failure_ends_nothing(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run = Mock()
    run.log.side_effect = ConnectionError("the network is gone") if fails else None
    fake = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None, origin="fake")
    fake.init = lambda **_: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 1}).encode())

    with pytest.raises(TryAgain), tracking(job, ["wandb"]):  # noqa: PT012 - what a stopped command does
        train(job, ALONE)
        raise TryAgain("stopped")

    assert fails or [call.args[0]["step"] for call in run.log.call_args_list] == [1, 2, 3]
    assert [call.args for call in run.finish.call_args_list] == ([] if fails else [(TryAgain.exit_code,)])
