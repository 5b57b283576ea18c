"""A client and a head of different versions say so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k8s.controller.head_facts import describe_head
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import RECORD_VERSION, UnknownRecord
from k8s.objects.record import record_of
from k8s.objects.worker_group import worker_group_of
from tests.k8s.builders import deployment_of
from tests.k8s.rendered import Thing, cluster_of


def record_with(remove: str = "", **changes: Any) -> str:
    """A record as another version of the tool would write it."""
    fields = json.loads(deployment_of().to_json()) | changes
    fields.pop(remove, None)
    return json.dumps(fields)


@pytest.mark.parametrize(
    "text",
    [
        record_with(version=RECORD_VERSION + 1),
        record_with(version=RECORD_VERSION - 1),
        record_with(hosts=2),
        record_with(remove="image"),
        record_with(remove="version"),
        "7",
        "{",
    ],
)
def test_a_client_says_that_another_version_deployed(overlays: dict[str, list[Thing]], text: str) -> None:
    made = render_deploy_job(worker_group_of(cluster_of(overlays["local"]), "trainer"), deployment_of())
    made["spec"]["template"]["spec"]["containers"][0]["args"] = [text]
    with pytest.raises(UnknownRecord, match=r"Job deploy-trainer: .*git pull") as raised:
        record_of(made)
    assert raised.value.exit_code == 4


def test_a_head_says_which_records_it_reads() -> None:
    assert describe_head()["records"] == [RECORD_VERSION]
