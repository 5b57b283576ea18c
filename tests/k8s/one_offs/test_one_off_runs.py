"""A one-off is followed to its end: its output, its files, lost pods, interruptions and nodes that do not come."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from k8s.client import deployment_watch, kuberay_one_off
from k8s.objects.names import OUTCOME_ANNOTATION
from k8s.objects.record import Outcome
from services.common.process.entry_point import exit_code_of
from tests.k8s.one_offs.cluster import POOL, Ask, Cluster, run
from tests.k8s.rendered import Thing
from tests.polling import Script


@pytest.mark.parametrize(
    ("code", "reason", "expected", "said"),
    [
        (0, "Completed", 0, ""),
        (3, "Error", 3, ""),
        (75, "Error", 75, ""),
        (137, "OOMKilled", 4, "112Gi (MEMORY=)"),
        (137, "Error", 75, "(Error, exit code 137)"),
    ],
)
def test_it_is_followed_to_its_end_and_then_nothing_of_it_is_left(
    api: Cluster,
    ask: Ask,
    while_waiting: Script,
    capsys: pytest.CaptureFixture[str],
    code: int,
    reason: str,
    expected: int,
    said: str,
) -> None:
    while_waiting(api.begin_pod, lambda: api.end_pod(code, reason, "tokens 5", "loss 3.2"))
    assert run(api, ask()) == expected
    told = capsys.readouterr().out
    assert "$9.66" in told
    assert told.count("tokens 5\nloss 3.2\n") == 1
    assert said in told
    assert api.names("Job") == []


def test_one_that_takes_too_long_or_is_lost_is_typed_again(api: Cluster, ask: Ask, while_waiting: Script) -> None:
    def lose() -> None:
        api.delete("Pod", api.names("Pod")[0], grace_seconds=0)
        api.end_job("Failed")

    while_waiting(api.begin_pod, lose)
    assert run(api, ask()) == 75
    while_waiting(api.begin_pod, lambda: api.end_job("Failed", "DeadlineExceeded"))
    assert run(api, ask(hours=0.5)) == 75


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_it(pooled: Cluster, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]) -> None:
    while_waiting(pooled.begin_pod, interrupt)
    assert exit_code_of(lambda: run(pooled, ask())) == 130
    assert pooled.one_offs == []
    assert "is deleted: its pod gets SIGTERM" in capsys.readouterr().out
    [nodes_job] = pooled.names("Job")
    assert nodes_job.startswith("one-off-nodes-trainer-"), "it gives the node back, and ends by itself"


def test_the_same_of_the_same_person_is_followed_and_its_unseen_end_is_shown(
    api: Cluster, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(api, ask(is_followed=False)) == 0
    [first] = api.one_offs
    assert f"{first} continues" in capsys.readouterr().out
    assert run(api, ask("export", is_followed=False)) == 0
    assert len(api.sent) == 2, "another command is another Job"
    monkeypatch.setenv("LOGNAME", "somebody else")
    assert run(api, ask(is_followed=False)) == 0
    assert len(api.sent) == 3
    monkeypatch.undo()
    monkeypatch.setattr(kuberay_one_off, "find_image_labels", lambda group, image: {})
    monkeypatch.setattr(deployment_watch, "POLL_SECONDS", 0.01)
    for name in [each for each in api.one_offs if each != first]:
        api.delete("Job", name)
    api.begin_pod()
    api.end_pod(3, "Error", "it said this before")
    assert run(api, ask()) == 3
    told = capsys.readouterr().out
    assert re.search(rf"{first} of .* has already run this request", told)
    assert "it said this before\n" in told
    assert api.one_offs == []


def test_a_node_comes_for_it_from_the_group_of_cpu_nodes(
    pooled: Cluster, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(pooled.begin_pod, lambda: pooled.end_pod(0))
    assert run(pooled, ask()) == 0
    assert f"nodes       node group {POOL}: one node" in capsys.readouterr().out
    assert [job["metadata"]["labels"]["millrace.dev/component"] for job in pooled.sent] == ["one-off-nodes", "one-off"]


NO_CAPACITY = json.dumps(asdict(Outcome(75, "there is no capacity")))


@pytest.mark.parametrize(
    ("patch", "code", "named"),
    [
        ({"metadata": {"annotations": {OUTCOME_ANNOTATION: NO_CAPACITY}}}, 75, "there is no capacity"),
        ({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, 4, "HEAD_TAG="),
    ],
)
def test_a_node_that_does_not_come_ends_it(
    pooled: Cluster,
    ask: Ask,
    while_waiting: Script,
    capsys: pytest.CaptureFixture[str],
    patch: Thing,
    code: int,
    named: str,
) -> None:
    def refuse() -> None:
        [name] = [each for each in pooled.names("Job") if each.startswith("one-off-nodes-")]
        pooled.merge("Job", name, patch)

    while_waiting(lambda: pooled.begin_pod(phase="Pending"), refuse)
    assert exit_code_of(lambda: run(pooled, ask())) == code
    assert named in capsys.readouterr().err
    assert pooled.one_offs == []


def test_one_that_does_not_begin_in_time_is_deleted(
    api: Cluster, ask: Ask, while_waiting: Script, capsys: pytest.CaptureFixture[str], clock: Any
) -> None:
    while_waiting(
        lambda: api.begin_pod(phase="Pending"), lambda: setattr(clock, "now", clock.now + 1_801), lambda: None
    )
    assert exit_code_of(lambda: run(api, ask())) == 75
    assert "WAIT=" in capsys.readouterr().err
    assert api.one_offs == []
