"""A real Prometheus scrapes a training's exporter and evaluates the alerts."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.launch.metrics_export import export_metrics
from services.common.process.progress import reporting_progress
from services.common.testing.waiting import wait_until
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.metrics.prometheus import RunCollector
from services.trainer.metrics.records import METRICS_FILE
from services.trainer.tests.builders import building_jobs
from services.trainer.tests.metric_lines import STEP, append
from tests.monitoring.exported import write_plain_rules
from tests.monitoring.promtool import require_program

OF_THIS_MACHINE = "FileSystemFilling"
"""Alert that depends on the disk of the test."""


class Server:
    """A Prometheus on loopback that scrapes one address every half second."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **query: str) -> Any:
        """Return the answer's data; None while the server starts."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]
        except urllib.error.URLError:
            return None

    def alerts(self) -> set[str]:
        """Return the names of the alerts that fire."""
        firing = {each["labels"]["alertname"] for each in self.get("alerts")["alerts"] if each["state"] == "firing"}
        return firing - {OF_THIS_MACHINE}

    def value(self, query: str) -> float:
        """Return the value of a query with at most one series; 0 if it has none."""
        found = (self.get("query", query=query) or {"result": []})["result"]
        return float(found[0]["value"][1]) if found else 0.0


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder.mkdir()
    write_plain_rules(folder / "rules.yaml", **{"for": "0s"})  # the cases of promtool have the waiting times
    configuration = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "training", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    options = ("--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (folder / "log.txt").open("wb") as log:
        server = subprocess.Popen([require_program("prometheus"), *options], cwd=folder, stderr=log)
    try:
        yield Server(address)
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with building_jobs(tmp_path) as build:
        yield build


def test_a_real_prometheus_fires_on_a_stall_a_spike_and_a_skipped_step_and_not_before(
    tmp_path: Path, new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    require_program("prometheus")
    job = new_job(train__max_steps="100", checkpoint__interval_steps="50")

    def take_step(step: int, seconds_ago: float = 0.0, **values: float) -> None:
        line = {**STEP, "step": step, "time": time.time() - seconds_ago, **values}
        append(job.run_folder / METRICS_FILE, json.dumps(line).encode())

    with reporting_progress("trainer"), export_metrics([RunCollector(job)], job.root, "inline", 0, "127.0.0.1"):
        target = urllib.parse.urlsplit(capfd.readouterr().out.split()[-1]).netloc
        with prometheus(tmp_path / "prometheus", target) as server:
            take_step(1)
            wait_until(lambda: server.value("run:millrace_step:max") == 1, 60)
            take_step(2)
            wait_until(lambda: server.value("count_over_time(run:millrace_step:max[1m])") >= 3, 60)
            assert server.alerts() == set()

            take_step(3, seconds_ago=1_000, skipped_steps=1, graphs_compiled=0)
            record_event(job, "loss_spike", step=3, first_step=3, loss=9.0, limit=6.0)
            wait_until(lambda: server.alerts() == {"TrainingStalled", "LossSpiked", "StepsSkipped"}, 60)
