"""The add-ons are the versions that are tested, fit what the manifests need, and helm is called as it has to be."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.addons.releases import read_releases
from infra.tests.conftest import RunInfra
from infra.tests.programs import Programs
from infra.workloads.kubernetes_cluster import release_of

REPOSITORY = Path(__file__).parents[2]
MARK = "millrace.dev/installed-by=make-addons"
WHERE = f"--namespace {{}} --create-namespace --values {{}} --labels {MARK} --atomic --timeout 10m"
NAMES = ["kuberay", "volcano", "neuron", "efa", "monitoring"]
RELEASES = {release.name: release for release in read_releases()}


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(RELEASES[name].values.read_text(encoding="utf-8"))
    return values


def test_volcano_s_images_are_of_its_version_and_pulled_once_a_node() -> None:
    """The nodes keep Volcano's images, so that its scheduler starts again while the public registry does not answer."""
    basic = values_of("volcano")["basic"]

    assert basic["image_tag_version"] == f"v{RELEASES['volcano'].version}"
    assert basic["image_pull_policy"] == "IfNotPresent"


def test_the_device_plugin_is_of_the_images_sdk() -> None:
    platforms = tomllib.loads((REPOSITORY / "images/platforms.toml").read_text(encoding="utf-8"))

    assert values_of("neuron")["devicePlugin"]["image"]["tag"] == platforms["neuron"]["node"]["device_plugin"]


def test_the_operator_has_no_batch_scheduler_of_its_own() -> None:
    assert values_of("kuberay")["batchScheduler"] == {"enabled": False, "name": ""}


def test_neuron_watches_its_devices_and_schedules_nothing() -> None:
    values = values_of("neuron")

    assert values["npd"]["enabled"] is True
    assert values["npd"]["nodeRecovery"]["enabled"] is False
    assert values["scheduler"]["enabled"] is False
    assert values["draDriver"]["enabled"] is False


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


def test_the_file_system_driver_is_installed_once() -> None:
    """Terraform installs the driver from EKS' catalogue."""
    assert [*RELEASES] == NAMES


def test_a_dry_run_prints_the_commands(
    run_infra: RunInfra, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")

    lines = run_infra("addons").stdout.splitlines()

    sources = {name: f"{each.chart} --repo {each.repository}" for name, each in RELEASES.items()}
    sources["neuron"] = "oci://public.ecr.aws/neuron/neuron-helm-chart"
    sources = {name: f"{source} --version {RELEASES[name].version}" for name, source in sources.items()}
    assert [line for line in lines if line.startswith("helm upgrade")] == [
        f"helm upgrade --install {name} {sources[name]} {WHERE.format(each.namespace, each.values)}"
        for name, each in RELEASES.items()
    ]
    mark = f"kubectl label --local --filename - --output json {MARK}"
    assert [line for line in lines if not line.startswith("helm upgrade")] == [
        f"helm show crds {sources[name]} | {mark} | kubectl apply --server-side --force-conflicts --filename -"
        for name in ("kuberay", "monitoring")
    ] + [f"kubectl apply --server-side --force-conflicts --kustomize {REPOSITORY / 'k8s/monitoring'}"]
    assert programs.calls == []
