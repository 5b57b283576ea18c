"""TensorBoard, Prometheus and experiment trackers show every step, and their failures do not end a run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import posixpath
import re
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.proto.event_pb2 import Event

from services.common.errors import RecipeError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.metrics_server import MAX_CLIENTS, PREFIX, serve_metrics
from services.common.process.stop_reason import StopReason
from services.common.testing.waiting import wait_until
from services.trainer.health.silence import forget_heartbeats, write_heartbeat
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics import tensorboard
from services.trainer.metrics.events import record_event
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS
from services.trainer.metrics.prometheus import NewestMetrics, RunCollector, collect_run
from services.trainer.metrics.records import (
    METRICS_FILE,
    MetricsWriter,
    read_metrics,
)
from services.trainer.metrics.trackers import TRACKERS, mlflow_name, tracking
from services.trainer.stop import request_stop
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.metric_lines import STEP, append
from services.trainer.tests.runs import call_trainer

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


def test_tensorboard_shows_every_step_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({"step": step, "loss": 4.0 / step, "note": 1})
        assert scalars_in(tmp_path / "tensorboard") == {each: {"loss": 4.0 / each} for each in range(1, step + 1)}
    writer.close()
    assert next(events_in(tmp_path / "tensorboard")).file_version == "brain.Event:2"


def test_a_folder_for_tensorboard_that_cannot_be_made_stops_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensorboard, "RETRY_SECONDS", 0.0)
    (tmp_path / "tensorboard").write_text("not a folder")
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({**STEP, "step": step})
    (tmp_path / "tensorboard").unlink()
    writer.log({**STEP, "step": 3})
    writer.close()

    assert [record["step"] for record in read_metrics(tmp_path).lines] == [1, 2, 3]
    assert list(scalars_in(tmp_path / "tensorboard")) == [3]
    assert caplog.text.count("TensorBoard's events cannot be written") == 1


def test_a_file_system_that_fails_while_events_are_written_stops_no_run(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="40")
    folder = job.run_folder / "tensorboard"
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=4k tmpfs '{folder}' 2>/dev/null") != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        train(job, ALONE)  # its events do not fit
        log = (job.run_folder / "logs" / "rank-00000.log").read_text(encoding="utf-8")
    finally:
        os.system(f"umount '{folder}'")
    assert log.count("TensorBoard's events cannot be written: No space left on device") == 1
    assert [record["step"] for record in read_metrics(job.run_folder).lines] == list(range(1, 41))


def scrape(url: str) -> dict[str, dict[str, float]]:
    """Return the values of each metric by the value of its label, which is empty if the metric has none."""
    with urllib.request.urlopen(url, timeout=60) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    labels = {PREFIX + metric.name: metric.label for metric in (*METRICS, *RUN_METRICS)}
    found = dict[str, dict[str, float]]()
    for family in families:
        assert family.documentation
        name = family.name + ("_total" if family.type == "counter" else "")
        samples = [each for each in family.samples if each.name == name]  # a counter also has its time of creation
        assert all(set(each.labels) == {"run", labels[name]} - {None} for each in samples)
        found[name] = {each.labels.get(labels[name] or "", ""): each.value for each in samples}
    return found


def test_a_labelled_metric_is_an_object_in_the_file_and_a_series_for_each_value_in_the_views(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    strange = 'a "quoted\\path"\nof two lines, {braces} = ä'
    with serve_metrics([NewestMetrics(tmp_path, "run")], "127.0.0.1", 0):
        url = capfd.readouterr().out.split()[-1]
        writer = MetricsWriter(tmp_path, first_step=0)
        writer.log({**STEP, "step": 1, "gradient_norm_by_group": {"embedding": 1.0, strange: 3.0}})
        before = scrape(url)
        writer.log({**STEP, "step": 2})
        writer.log({**STEP, "step": 3, "gradient_norm_by_group": {"embedding": 2.0}})
        writer.close()
        after = scrape(url)

    name = "gradient_norm_by_group"
    assert [record.get(name) for record in read_metrics(tmp_path).lines] == [
        {"embedding": 1.0, strange: 3.0}, None, {"embedding": 2.0},
    ]  # fmt: skip
    shown = {
        step: {k: v for k, v in values.items() if name in k}
        for step, values in scalars_in(tmp_path / "tensorboard").items()
    }
    assert shown == {1: {f"{name}/embedding": 1.0, f"{name}/{strange}": 3.0}, 2: {}, 3: {f"{name}/embedding": 2.0}}
    assert before[PREFIX + name] == {"embedding": 1.0, strange: 3.0}
    assert after[PREFIX + name] == {"embedding": 2.0}
    assert after[PREFIX + "update_ratio_by_group"] == {}


@pytest.mark.parametrize(
    "value", ["hf://HuggingFaceFW/fineweb-edu@main", "..", "/a//b/../c", "file:*?.txt", "x" * 10_000]
)
def test_mlflow_takes_the_names_of_labelled_metrics(value: str) -> None:
    name = mlflow_name(f"validation_loss_by_source/{value}")
    assert re.fullmatch(r"[/\w.\- :]{1,250}", name)
    assert posixpath.normpath(name) == name


def test_a_scrape_during_training_has_every_metric_that_the_readme_names(
    new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    job = new_job(
        parallel__data_parallel_size="1",
        train__max_steps="100000",
        train__evaluation_interval_steps="2",
        train__health_interval_steps="2",
        checkpoint__interval_steps="2",
    )
    with serve_metrics(collect_run(job), "127.0.0.1", 0):
        url = capfd.readouterr().out.split()[-1]
        has_ended, scraped = threading.Event(), [scrape(url)]

        def has_all() -> bool:
            values = scraped[-1]
            return values["millrace_step"][""] >= 3 and values["millrace_checkpoint_step"][""] >= 2

        def scrape_until_a_checkpoint_is_committed() -> None:
            while not has_ended.wait(0.05) and not has_all():
                scraped.append(scrape(url))
            request_stop(job.run_folder, StopReason.STOP_FILE)

        scraper = threading.Thread(target=scrape_until_a_checkpoint_is_committed)
        scraper.start()
        try:
            with pytest.raises(TryAgain):
                train(job, ALONE)
        finally:
            has_ended.set()
            scraper.join()
    found = scraped[-1]

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = readme.split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    assert rows == [[f"`{each.field}`", each.unit, each.reduction, each.help] for each in METRICS]
    assert list(found) == [PREFIX + each.name for each in (*METRICS, *RUN_METRICS)]
    unknown = {name.removeprefix(PREFIX) for name, values in found.items() if all(map(math.isnan, values.values()))}
    assert unknown == {
        *("slowest_rank", "straggler_score", "peak_device_bytes"),  # of one worker, on a CPU
        "validation_loss_by_source",  # the corpus has none
    }


def test_a_scrape_tells_the_age_of_a_runs_steps_checkpoints_and_heartbeats(
    new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    """The ages count by the clock of the scraped process, because the clocks of workers may be wrong."""
    job = new_job(parallel__data_parallel_size="2", train__max_steps="40", checkpoint__interval_steps="10")
    now = 1000.0
    clock_of_node = itertools.count(4 * 10**18, 10**9)

    def beat(*ranks: int) -> None:
        for rank in ranks:
            write_heartbeat(job.run_folder, {"rank": rank})
            path = job.run_folder / "heartbeats" / f"rank-{rank:05d}.json"
            os.utime(path, ns=(0, next(clock_of_node)))

    append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
    record_event(replace(job, attempt="an earlier command"), "restart", restarts=1)
    collector = RunCollector(job, now=lambda: now)
    with serve_metrics([collector], "127.0.0.1", 0):
        url = capfd.readouterr().out.split()[-1]

        def read() -> dict[str, float]:
            found = scrape(url)
            events = {f"events_total {kind}": value for kind, value in found.pop(f"{PREFIX}events_total").items()}
            return {name.removeprefix(PREFIX): values[""] for name, values in found.items()} | events

        before = read()
        assert before["events_total restart"] == before["checkpoint_step"] == 0
        assert math.isnan(before["last_step_time_seconds"])
        assert math.isnan(before["heartbeat_age_seconds"])

        append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 4, "time": 4e9}).encode())
        record_event(job, "nan", cause="data")
        beat(0, 1)
        assert read()["heartbeat_age_seconds"] == 0
        now = 1007.0
        beat(0, 1)
        assert read()["heartbeat_age_seconds"] == 0
        now = 1100.0
        beat(0)
        after = read()
        assert after["heartbeat_age_seconds"] == 93
        assert (after["last_step_time_seconds"], after["start_time_seconds"]) == (1000, 1000)
        assert (after["events_total nan"], after["events_total restart"]) == (1, 0)

        forget_heartbeats(job.run_folder)
        assert math.isnan(read()["heartbeat_age_seconds"])
        beat(0)  # another command goes on with one worker
        assert read()["heartbeat_age_seconds"] == 0
        folder = job.checkpoint_collection / "step-00000010"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        os.utime(folder / "manifest.json", (900, 900))
        newest = read()
    assert (newest["checkpoint_step"], newest["checkpoint_time_seconds"]) == (10, 900)
    assert (newest["checkpoint_interval_steps"], newest["max_steps"]) == (10, 40)


def test_a_client_that_resets_its_connection_is_no_event_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The client resets before, during and after its request."""
    with serve_metrics([NewestMetrics(tmp_path, "run")], "127.0.0.1", 0):
        url = capfd.readouterr().out.split()[-1]
        port = int(url.rpartition(":")[2].partition("/")[0])
        for request in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n") * 5:
            client = socket.create_connection(("127.0.0.1", port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            client.sendall(request)
            client.close()
        assert scrape(url)
        wait_until(lambda: not [each for each in threading.enumerate() if "process_request" in each.name], 60)

    assert capfd.readouterr().err == ""


def test_a_scraper_that_asks_for_a_version_that_is_no_number_gets_the_text_format(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve_metrics([NewestMetrics(tmp_path, "run")], "127.0.0.1", 0):
        url = capfd.readouterr().out.split()[-1]
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=a.b"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert f"{PREFIX}loss" in answer.read().decode()

    assert capfd.readouterr().err == ""


def test_idle_clients_are_limited_and_the_next_scrape_succeeds_once_they_leave(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve_metrics([NewestMetrics(tmp_path, "run")], "127.0.0.1", 0):
        url = capfd.readouterr().out.split()[-1]
        port = int(url.rpartition(":")[2].partition("/")[0])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CLIENTS + 3)]
        for client in clients[MAX_CLIENTS:]:
            client.settimeout(30)
            assert client.recv(1) == b"", "one above the limit is closed"
        for client in clients:
            client.close()
        wait_until(lambda: not [each for each in threading.enumerate() if "process_request" in each.name], 60)
        assert scrape(url)


@pytest.mark.parametrize("host", ["\u00e4..b", "\udcff", "no host"])
def test_a_host_that_is_no_name_is_an_error_of_the_command_line(tmp_path: Path, host: str) -> None:
    with pytest.raises(RecipeError, match="--metrics-port 0: cannot listen"), serve_metrics([], host, 0):
        pass


def test_a_port_that_is_taken_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(RecipeError, match=f"--metrics-port {port}: cannot listen"),
            serve_metrics([], "127.0.0.1", port),
        ):
            pass


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_asked_for_and_absent_ends_the_command_at_start(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed here")
    code, printed = call_trainer(capfd, write_recipe(tmp_path), tmp_path / "fsx", "--tracker", name)
    assert code == 4
    assert f"--python {sys.executable} {name}`" in printed
    assert not (tmp_path / "fsx").exists()


def test_a_tracker_gets_every_new_record_and_one_that_fails_ends_nothing(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        def __init__(self, job: Job) -> None:
            self.steps: list[int] = []
            kept.append(self)

        def log(self, step: int, values: dict[str, float]) -> None:
            self.steps.append(step)

        def close(self, exit_code: int) -> None:
            self.steps.append(-exit_code)

    class Failing(Kept):
        def log(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("the network is gone")

    kept: list[Kept] = []
    monkeypatch.setitem(TRACKERS, "wandb", Failing)
    monkeypatch.setitem(TRACKERS, "mlflow", Kept)

    def train_until_stopped(job: Job) -> None:
        with tracking(job, ["wandb", "mlflow"]):
            train(job, ALONE)
            raise TryAgain("stopped")

    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 1}).encode())
    with pytest.raises(TryAgain, match="stopped"):
        train_until_stopped(job)

    assert [tracker.steps for tracker in kept] == [[], [1, 2, 3, -TryAgain.exit_code]]
    log = (job.run_folder / "logs" / "rank-00000.log").read_text(encoding="utf-8")
    assert len(re.findall("wandb: .*the network is gone", log)) == 1
