"""The patterns in infra/ by which a pod's log reaches CloudWatch fit the pods that k8s/ and the add-ons make."""

from __future__ import annotations

import fnmatch
import re
from functools import cache

import pytest
import yaml

from images.platforms import REPOSITORY
from k8s.objects.names import NAMESPACE, PREFLIGHT, job_name, one_off_nodes_name
from services.common.recipe.schema import STAGES
from tests.contract.agreements import STACK, read_locals
from tests.k8s.rendered import Thing

ID = "0" * 64
OPERATORS = {"kuberay": "kuberay-operator-7d9c", "volcano": "volcano-scheduler-7d9c"}


@cache
def list_patterns() -> dict[str, tuple[list[str], list[str]]]:
    """Reads the patterns of files, and of excluded files, by log group."""
    text = (STACK / "main.tf").read_text(encoding="utf-8")
    own = read_locals()
    files = re.findall(r'"/var/log/containers/([^"]+)"', text)
    assert len(files) == 6, f"this test knows 6 patterns, and the stack has {files}"
    *of_stage, of_namespace, of_operators, of_driver = [
        each.replace("${local.namespace}", own["namespace"]) for each in files
    ]
    found: dict[str, tuple[list[str], list[str]]] = {
        stage: ([each.replace("${stage}", stage) for each in of_stage], [])
        for stage in own["images"]
        if stage != "head"
    }
    of_stages = [pattern for patterns, _ in found.values() for pattern in patterns]
    operators = [of_operators.replace("${namespace}", namespace) for namespace in own["operator_namespaces"]]
    return {**found, "head": ([of_namespace], of_stages), "operators": ([*operators, of_driver], [])}


def log_groups_of(pod: str, namespace: str, container: str) -> list[str]:
    """Names the log groups to which the file of a container's log goes; kubelet names the file."""
    file = f"{pod}_{namespace}_{container}-{ID}.log"
    return [
        group
        for group, (files, excluded) in list_patterns().items()
        if any(fnmatch.fnmatchcase(file, each) for each in files)
        and not any(fnmatch.fnmatchcase(file, each) for each in excluded)
    ]


def test_every_pod_of_a_stage_logs_to_the_group_of_its_stage(eks: Thing) -> None:
    for group in eks["spec"]["workerGroupSpecs"]:
        stage = group["groupName"]
        [container] = group["template"]["spec"]["containers"]
        assert log_groups_of(f"millrace-{stage}-worker-x7k2p", NAMESPACE, container["name"]) == [stage]
    for stage in STAGES:
        assert log_groups_of(f"{job_name(stage)}-x7k2p", NAMESPACE, "deploy") == [stage]
        assert log_groups_of(f"{job_name(stage)}-x7k2p", NAMESPACE, PREFLIGHT) == [stage]
        assert log_groups_of(f"one-off-{stage}-0a1b2c3d-x7k2p", NAMESPACE, "one-off") == [stage]


@pytest.mark.parametrize(
    ("pod", "namespace", "container", "groups"),
    [
        ("millrace-head-x7k2p", NAMESPACE, "ray-head", ["head"]),
        ("reaper-29400000-x7k2p", NAMESPACE, "reaper", ["head"]),
        ("preflight-network-0a1b2c-x7k2p", NAMESPACE, "look", ["head"]),
        (f"{one_off_nodes_name('one-off-trainer-0a1b2c3d')}-x7k2p", NAMESPACE, "one-off-nodes", ["head"]),
        ("fsx-csi-controller-5f6d", "kube-system", "fsx-plugin", ["operators"]),
        ("fsx-csi-node-x7k2p", "kube-system", "fsx-plugin", ["operators"]),
        ("coredns-5f6d", "kube-system", "coredns", []),
        ("trainer-5f6d", "other", "trainer", []),
    ],
)
def test_every_other_pod_logs_to_the_group_of_the_head_or_the_operators_or_to_none(
    pod: str, namespace: str, container: str, groups: list[str]
) -> None:
    assert log_groups_of(pod, namespace, container) == groups


def test_the_operators_log_from_the_namespaces_that_they_are_installed_to() -> None:
    releases = yaml.safe_load((REPOSITORY / "infra/addons/addons.yaml").read_text(encoding="utf-8"))["releases"]
    namespaces = {each["name"]: each["namespace"] for each in releases}
    for name, pod in OPERATORS.items():
        assert log_groups_of(pod, namespaces[name], name) == ["operators"]
