"""The add-ons are the versions that are tested, fit what the manifests need, and helm is called as it has to be."""

from __future__ import annotations

import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.addons.releases import read_releases
from infra.workloads.kubernetes_cluster import release_of

REPOSITORY = Path(__file__).parents[2]
NAMES = ["kuberay", "volcano", "neuron", "efa", "monitoring"]
RELEASES = {release.name: release for release in read_releases()}


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(RELEASES[name].values.read_text(encoding="utf-8"))
    return values


PLATFORMS = tomllib.loads((REPOSITORY / "images/platforms.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("volcano", "basic.image_tag_version", f"v{RELEASES['volcano'].version}"),
        ("neuron", "devicePlugin.image.tag", PLATFORMS["neuron"]["node"]["device_plugin"]),
        ("neuron", "npd.nodeRecovery.enabled", False),
        ("kuberay", "batchScheduler", {"enabled": False, "name": ""}),
    ],
)
def test_an_add_on_has_the_values_that_the_stages_need(name: str, path: str, expected: Any) -> None:
    assert reduce(lambda values, key: values[key], path.split("."), values_of(name)) == expected


def test_no_load_balancer_is_made_and_a_teardown_knows_and_removes_the_one_volume() -> None:
    """The claim has the mark of its release, and goes with it."""
    for release in RELEASES.values():
        text = release.values.read_text(encoding="utf-8")
        assert "LoadBalancer" not in text
        assert ("volumeClaimTemplate" in text) == (release.name == "monitoring")
    values, release = values_of("monitoring"), RELEASES["monitoring"]
    spec = values["prometheus"]["prometheusSpec"]
    claim = spec["storageSpec"]["volumeClaimTemplate"]
    assert release_of(claim) == (release.namespace, release.name)
    assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete"
    [storage_class] = [each for each in values["extraManifests"] if each["kind"] == "StorageClass"]
    assert claim["spec"]["storageClassName"] == storage_class["metadata"]["name"]
    assert storage_class["reclaimPolicy"] == "Delete"
