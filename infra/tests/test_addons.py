"""The add-ons are the versions that are tested, fit what the manifests need, and helm is called as it has to be."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.addons.releases import ADDONS, read_releases
from infra.tests.programs import Programs
from k8s.client.overlay import render
from tests.command import call
from tests.k8s.rendered import OVERLAYS, of_kind

REPOSITORY = Path(__file__).parents[2]
MARK = "millrace.dev/installed-by=make-addons"
WHERE = f"--namespace {{}} --create-namespace --values {{}} --labels {MARK} --atomic --timeout 10m"
NAMES = ["kuberay", "volcano", "neuron", "efa", "monitoring"]


def values_of(name: str) -> dict[str, Any]:
    [release] = [each for each in read_releases() if each.name == name]
    values: dict[str, Any] = yaml.safe_load(release.values.read_text(encoding="utf-8"))
    return values


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    return render(OVERLAYS["eks"])


def test_operators_are_the_versions_that_the_test_cluster_runs() -> None:
    modules = (REPOSITORY / "tests/cluster/kit/go.mod").read_text(encoding="utf-8")
    versions = {release.name: release.version for release in read_releases()}

    assert re.search(r"kuberay/ray-operator v(\S+)", modules)[1] == versions["kuberay"]  # type: ignore[index]
    assert re.search(r"volcano.sh/volcano v(\S+)", modules)[1] == versions["volcano"]  # type: ignore[index]
    assert values_of("volcano")["basic"]["image_tag_version"] == f"v{versions['volcano']}"


def test_volcano_is_pulled_once_a_node() -> None:
    """The nodes keep Volcano's images, so that its scheduler starts again while the public registry does not answer."""
    assert values_of("volcano")["basic"]["image_pull_policy"] == "IfNotPresent"


def test_the_device_plugin_is_of_the_images_sdk() -> None:
    platforms = tomllib.loads((REPOSITORY / "images/platforms.toml").read_text(encoding="utf-8"))

    assert values_of("neuron")["devicePlugin"]["image"]["tag"] == platforms["neuron"]["node"]["device_plugin"]


def test_the_operator_has_no_batch_scheduler_of_its_own() -> None:
    assert values_of("kuberay")["batchScheduler"] == {"enabled": False, "name": ""}


@pytest.mark.parametrize("name", ["neuron", "efa"])
def test_device_plugins_come_to_the_tainted_nodes(name: str) -> None:
    values = values_of(name)
    daemon = values["devicePlugin"] if name == "neuron" else values

    assert {"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"} in daemon["tolerations"]
    assert daemon["nodeSelector"] == {"millrace.dev/pool": "trainium"}


def test_neuron_watches_its_devices_and_schedules_nothing() -> None:
    values = values_of("neuron")

    assert values["npd"]["enabled"] is True
    assert values["npd"]["nodeRecovery"]["enabled"] is False
    assert values["scheduler"]["enabled"] is False
    assert values["draDriver"]["enabled"] is False


def test_prometheus_finds_our_pod_monitor_and_may_reach_the_pods(manifests: list[dict[str, Any]]) -> None:
    [monitor] = of_kind(manifests, "PodMonitor").values()
    policy = of_kind(manifests, "NetworkPolicy")["metrics"]
    prometheus = values_of("monitoring")["prometheus"]["prometheusSpec"]
    [release] = [each for each in read_releases() if each.name == "monitoring"]

    wanted = prometheus["podMonitorSelector"]["matchLabels"]
    assert wanted.items() <= monitor["metadata"]["labels"].items()
    wanted = prometheus["podMonitorNamespaceSelector"]["matchLabels"]
    assert wanted == {"kubernetes.io/metadata.name": monitor["metadata"]["namespace"]}
    [rule] = policy["spec"]["ingress"]
    allowed = rule["from"][0]["namespaceSelector"]["matchLabels"]
    assert allowed == {"kubernetes.io/metadata.name": release.namespace}


def test_nothing_makes_a_volume_or_a_load_balancer_that_a_teardown_would_have_to_find() -> None:
    for release in read_releases():
        text = release.values.read_text(encoding="utf-8")
        assert "LoadBalancer" not in text
        assert "volumeClaimTemplate" not in text


def test_the_file_system_driver_is_installed_once() -> None:
    """Terraform installs the driver from EKS' catalogue."""
    assert [release.name for release in read_releases()] == NAMES


def test_a_dry_run_prints_the_commands(
    capfd: pytest.CaptureFixture[str], programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")

    done = call(capfd, "infra.__main__", "addons")

    repositories = {
        "kuberay": "kuberay-operator --repo https://ray-project.github.io/kuberay-helm/",
        "volcano": "volcano --repo https://volcano-sh.github.io/helm-charts",
        "neuron": "oci://public.ecr.aws/neuron/neuron-helm-chart",
        "efa": "aws-efa-k8s-device-plugin --repo https://aws.github.io/eks-charts",
        "monitoring": "kube-prometheus-stack --repo https://prometheus-community.github.io/helm-charts",
    }
    versions = ["1.6.1", "1.14.1", "1.9.0", "v0.5.30", "92.21.2"]
    namespaces = ["kuberay-system", "volcano-system", "kube-system", "kube-system", "monitoring"]
    assert done.returncode == 0
    installs = [line for line in done.stdout.splitlines() if line.startswith("helm upgrade")]
    assert installs == [
        f"helm upgrade --install {name} {repositories[name]} --version {version} "
        + WHERE.format(namespace, ADDONS / "values" / f"{name}.yaml")
        for name, version, namespace in zip(NAMES, versions, namespaces, strict=True)
    ]
    crds = "kubectl label --local --filename - --output json millrace.dev/installed-by=make-addons"
    assert [line for line in done.stdout.splitlines() if line not in installs] == [
        f"helm show crds {repositories[name]} --version {version} | {crds} | "
        f"kubectl apply --server-side --force-conflicts --filename -"
        for name, version in zip(NAMES, versions, strict=True)
        if name in ("kuberay", "monitoring")
    ]
