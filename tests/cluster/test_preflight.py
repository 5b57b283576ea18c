"""Preflight names the cause for which a deployment cannot run, from what a real cluster answers, and sends nothing.

The causes that nodes and recipes decide alone are in tests/k8s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from images.platforms import REPOSITORY
from k8s.objects.api import Api
from services.common.testing.waiting import wait_until
from tests.cluster.harness import Harness, load_images, make_house, name_of
from tests.cluster.kit import cluster, fake_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def harness(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head")
    fake_nodes.fake(2)
    with make_house(kit, tmp_path_factory.mktemp("preflight"), REPOSITORY / "tests/cluster/overlays/fake") as made:
        yield made
    fake_nodes.remove_fake(2)


def refused(harness: Harness, stage: str = "compiler", **variables: str) -> tuple[int, str]:
    """Exit code and words of a deployment that is not to be."""
    variables = {"TAG": name_of("head"), "ARGS": "--cluster.compiler_nodes=2", **variables}
    done = harness.run("deploy-stage", STAGE=stage, FOLLOW="0", **variables)
    if done.code == 0:
        harness.stop(stage)
    assert done.code != 0, done.said
    assert "Traceback" not in done.said
    assert harness.api.find("Job", f"deploy-{stage}") is None
    return done.code, done.said


@contextmanager
def without(harness: Harness, kind: str, name: str) -> Iterator[None]:
    """An object is missing, and comes back."""
    thing = harness.api.find(kind, name)
    assert thing is not None
    harness.api.delete(kind, name)
    wait_until(lambda: harness.api.find(kind, name) is None)
    try:
        yield
    finally:
        for field in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
            thing["metadata"].pop(field, None)
        harness.api.create(thing)


Right = tuple[str, str]
"""A verb, and a resource with the name of an object where the right is for that one alone."""


def granted_rights() -> list[Right]:
    """The rights of people who deploy, as their roles grant them."""
    roles = yaml.safe_load_all((REPOSITORY / "k8s/base/people.yaml").read_text(encoding="utf-8"))
    return [
        (verb, "/".join(filter(None, (f"{resource}.{group}".rstrip("."), name))))
        for role in roles
        for rule in role.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
        if "/" not in resource
    ]


def test_who_is_in_the_group_may_deploy_and_nobody_else(harness: Harness) -> None:
    """The API server judges by the roles that were applied."""
    rights = granted_rights()
    assert ("create", "jobs.batch") in rights
    assert [right for right in rights if not may(right, "millrace-deployers")] == []
    assert [right for right in rights if may(right, "others")] == []
    beyond = [
        ("get", "secrets/hugging-face"),
        ("create", "pods"),
        ("patch", "rayclusters.ray.io/other"),
        ("create", "rayjobs.ray.io"),
        ("delete", "nodes"),
    ]
    assert [right for right in beyond if may(right, "millrace-deployers")] == []


def may(right: Right, group: str) -> bool:
    command = ("auth", "can-i", *right, f"--as-group={group}", "--as=somebody", "-n", "millrace")
    return cluster.kubectl(*command, quiet=True).strip() == "yes"


def test_a_queue_that_is_missing_closed_or_too_small(harness: Harness) -> None:
    with without(harness, "Queue", "millrace"):
        assert "queue millrace does not exist" in refused(harness)[1]
    wait_until(lambda: (harness.api.find("Queue", "millrace") or {}).get("status", {}).get("state") == "Open")
    harness.api.merge("Queue", "millrace", {"spec": {"capability": {"vpc.amazonaws.com/efa": "8"}}})
    said = refused(harness)[1]
    harness.api.merge("Queue", "millrace", {"spec": {"capability": {"vpc.amazonaws.com/efa": "128"}}})
    assert "queue millrace is too small for 2 compiler pods (vpc.amazonaws.com/efa: 16 asked, 8 in the queue)" in said


def test_an_image_that_no_node_has(harness: Harness) -> None:
    code, said = refused(harness, TAG="9.9.9-cpu")
    assert code == 4
    assert "no node has the image millrace/head:9.9.9-cpu" in said
    assert name_of("head") in said


def test_an_artifact_that_is_missing(harness: Harness) -> None:
    code, said = refused(harness, "trainer", RECIPE=str(REPOSITORY / "recipes/tiny-cpu.toml"))
    assert code == 3
    assert "services.tokenizer" in said or "STAGE=tokenizer" in said


def test_a_root_that_the_stages_cannot_write(harness: Harness) -> None:
    harness.root.chmod(0o555)
    cluster.run("chown", "0:0", harness.root)
    try:
        code, said = refused(harness)
    finally:
        cluster.run("chown", "10001:10001", harness.root)
        harness.root.chmod(0o755)
    assert code == 5
    assert "/fsx" in said


def test_a_person_without_rights(harness: Harness) -> None:
    """A user whom no role knows is told what is missing, not shown a traceback."""
    config = harness.root.parent / "nobody.kubeconfig"
    text = json.loads(cluster.KUBECONFIG.read_text())
    text["users"][0]["user"] = {"token": cluster.kubectl("-n", "default", "create", "token", "default").strip()}
    config.write_text(json.dumps(text))
    done = harness.run("stage-status", KUBECONFIG=str(config))
    assert done.code == 4
    assert "system:serviceaccount:default:default" in done.said
    assert "Traceback" not in done.said
