"""The overlay for a cluster that is there already, and the page that says what comes into it."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from images.platforms import REPOSITORY
from infra.addons.releases import choose_releases, read_releases
from k8s.client.overlay import OVERLAYS, render, require_filled_in
from k8s.objects.worker_group import worker_group_of
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES
from tests.k8s import rules
from tests.k8s.rendered import Thing, cluster_of, name_of
from tests.k8s.test_settings import FILLED_IN

EXISTING = OVERLAYS / "existing"
PAGE = REPOSITORY / "docs/operations/existing-cluster.md"


@pytest.fixture
def existing(overlays: dict[str, list[Thing]], tmp_path: Path) -> list[Thing]:
    """A copy of the overlay, filled in as the page says."""
    text = (EXISTING / "kustomization.yaml").read_text(encoding="utf-8")
    eks = os.path.relpath((OVERLAYS / "eks").resolve(), tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../eks", eks), encoding="utf-8")
    settings = (EXISTING / "settings.env").read_text(encoding="utf-8")
    for key, value in FILLED_IN.items():
        settings = settings.replace(f"{key}=CHANGE-ME", f"{key}={value}")
    (tmp_path / "settings.env").write_text(settings, encoding="utf-8")
    return render(tmp_path)


def test_it_is_refused_until_it_is_filled_in(overlays: dict[str, list[Thing]]) -> None:
    with pytest.raises(RecipeError, match="CHANGE-ME is still in"):
        require_filled_in(EXISTING, render(EXISTING))


def test_its_nodes_are_simply_there_and_it_keeps_the_rules(existing: list[Thing]) -> None:
    require_filled_in(EXISTING, existing)
    assert [worker_group_of(cluster_of(existing), stage).node_pool for stage in STAGES] == ["", "", ""]
    assert [problem for rule in (*rules.EVERYWHERE, *rules.IN_PRODUCTION) for problem in rule(existing)] == []
    assert "PodMonitor" not in {each["kind"] for each in existing}


def test_the_page_lists_all_that_is_cluster_wide(existing: list[Thing]) -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for each in existing:
        if each["kind"] in CLUSTER_WIDE:
            found[each["kind"]].add(each["metadata"]["name"])
    told = {}
    _, _, listed = PAGE.read_text(encoding="utf-8").partition("## What comes into the cluster")
    for kinds, names in re.findall(r"^\| ([A-Z][A-Za-z, ()]+) \| (`.*) \|$", listed, re.M):
        for kind in kinds.replace(" (Volcano)", "").split(", "):
            told[kind] = set(re.findall(r"`([a-z-]+)`", names.partition(", which")[0]))
    assert told == found
    namespaces = {each["metadata"]["namespace"] for each in existing if each["kind"] not in CLUSTER_WIDE}
    assert namespaces == found["Namespace"]
    assert not any("Webhook" in name_of(each) or "CustomResource" in name_of(each) for each in existing)


CLUSTER_WIDE = (
    *("Namespace", "ClusterRole", "ClusterRoleBinding", "PriorityClass", "PersistentVolume", "Queue"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)


def test_the_page_installs_what_is_tested_beside_an_operator_of_others() -> None:
    """Of the version of the add-on, and in a namespace whose policies let its pod in."""
    page = PAGE.read_text(encoding="utf-8")
    releases = {release.name: release for release in read_releases()}
    assert f"--version {releases['kuberay'].version} " in page
    assert f"--repo {releases['kuberay'].repository} " in page
    assert re.findall(r"--namespace (\S+)", page) == ["millrace-kuberay"]
    for only in re.findall(r"ONLY=([a-z,]+)", page):
        assert choose_releases(list(releases.values()), only)


def test_the_page_names_the_labels_and_the_taint_that_pods_select(existing: list[Thing]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for group in cluster_of(existing)["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert f"`millrace.dev/pool: {pod['nodeSelector']['millrace.dev/pool']}`" in page
        for each in pod.get("tolerations", []):
            assert f"`{each['key']}:{each['effect']}`" in page
    head = cluster_of(existing)["spec"]["headGroupSpec"]["template"]["spec"]
    assert f"`millrace.dev/pool: {head['nodeSelector']['millrace.dev/pool']}`" in page
    assert yaml.safe_dump(existing).count("CHANGE-ME") == 0
