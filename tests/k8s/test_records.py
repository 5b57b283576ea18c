"""A client and a head of different versions understand each other, or say which of them to update."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from k8s.controller import job
from k8s.controller.head_facts import describe_head
from k8s.objects.deploy_job import EXIT_ENDED_BADLY, render_deploy_job
from k8s.objects.deployment import RECORD_VERSION, Deployment, UnknownRecord
from k8s.objects.names import OUTCOME_ANNOTATION
from k8s.objects.record import Outcome, record_of
from k8s.objects.worker_group import worker_group_of
from tests.k8s.builders import deployment_of
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, cluster_of

# The fields of a record of this version. A field that comes, goes or means something else needs a new version.
VERSION = 5
FIELDS = {
    *("stage", "id", "image", "nodes", "mode", "recipe", "recipe_digest", "arguments", "retries", "keep", "user"),
    *("start_timeout_seconds", "loss_timeout_seconds", "drain_seconds", "fewer_nodes", "workers_per_node"),
    *("tensor_parallel_size", "node_pool", "capacity_ends_at", "ray_version"),
}


def record_with(remove: str = "", **changes: Any) -> str:
    """A record as another version of the tool would write it."""
    fields = json.loads(deployment_of().to_json()) | changes
    fields.pop(remove, None)
    return json.dumps(fields)


def test_a_record_that_changes_has_a_new_version() -> None:
    assert RECORD_VERSION == VERSION
    assert {field.name for field in dataclasses.fields(Deployment)} == FIELDS


@pytest.mark.parametrize(
    ("text", "mentions", "is_newer"),
    [
        (record_with(version=RECORD_VERSION + 1), "version 6.* 5", True),
        (record_with(version=RECORD_VERSION - 1), "version 4.* 5", False),
        (record_with(version="2.1"), "version 2.1", True),
        (record_with(hosts=2), "version 5.*hosts", True),
        (record_with(remove="image"), "version 5.*image", False),
        (record_with(remove="version"), "version None", True),
        ("[]", "version None", True),
        ("7", "int", True),
        ("{", "line 1", True),
    ],
)
def test_a_record_of_another_version_is_no_bug(text: str, mentions: str, is_newer: bool) -> None:
    with pytest.raises(UnknownRecord, match=mentions) as raised:
        Deployment.from_json(text)
    assert raised.value.is_newer == is_newer
    assert raised.value.exit_code == 4


@pytest.fixture
def cluster(overlays: dict[str, list[Thing]]) -> Thing:
    return cluster_of(overlays["local"])


def job_with(cluster: Thing, text: str) -> Thing:
    made = render_deploy_job(worker_group_of(cluster, "trainer"), deployment_of())
    made["spec"]["template"]["spec"]["containers"][0]["args"] = [text]
    return made


@pytest.mark.parametrize(
    ("text", "side"),
    [
        (record_with(hosts=2), "make cluster-up HEAD_TAG="),
        (record_with(version=9), "make cluster-up HEAD_TAG="),
        (record_with(remove="nodes"), "git pull"),
    ],
)
def test_a_deploy_job_that_cannot_read_its_record_ends_at_once_and_says_which_side_to_update(
    cluster: Thing, text: str, side: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api: Any = MemoryApi(job_with(cluster, text))
    monkeypatch.setattr(job, "connect", lambda: api)
    assert job.main(text) == EXIT_ENDED_BADLY
    outcome = Outcome(**json.loads(api.find("Job", "deploy-trainer")["metadata"]["annotations"][OUTCOME_ANNOTATION]))
    assert outcome.exit_code == 4
    assert side in outcome.message
    assert side in capsys.readouterr().out


def test_a_client_says_that_it_is_too_old_for_what_is_deployed(cluster: Thing) -> None:
    with pytest.raises(UnknownRecord, match=r"Job deploy-trainer: .*version 9.*git pull"):
        record_of(job_with(cluster, record_with(version=9)))


def test_a_head_says_which_records_it_reads() -> None:
    assert describe_head()["records"] == [RECORD_VERSION]
