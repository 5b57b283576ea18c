"""make addons, with and without DRY_RUN=1: the values of the releases, how helm and kubectl are called, and that what
others installed is left.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from images.platforms import REPOSITORY, read_neuron_nodes
from infra.addons.releases import read_releases
from infra.tests.conftest import RunInfra
from infra.tests.programs import Programs
from infra.tests.site import Cluster
from infra.workloads.kubernetes_cluster import release_of

RELEASES = {release.name: release for release in read_releases()}
NAMES = ["kuberay", "volcano", "neuron", "efa", "monitoring"]
MARK = "millrace.dev/installed-by=make-addons"


class Installed(Cluster):
    """A cluster whose kubectl and helm take orders, too."""

    def __init__(self, folder: Path, programs: Programs) -> None:
        super().__init__(folder, programs)
        self.answer()

    @property
    def applied(self) -> str:
        """The definitions that kubectl was given to apply."""
        file = self.folder / "applied.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def upgraded(self) -> list[str]:
        """The releases that helm was told to install or upgrade, in order."""
        return [line.split()[3] for line in self.programs.calls if line.startswith("helm upgrade --install")]


@pytest.fixture
def cluster(tmp_path: Path, programs: Programs) -> Installed:
    return Installed(tmp_path, programs)


def program(name: str, namespace: str, image: str, release: str = "") -> dict[str, Any]:
    """A Deployment of one container, of a helm release in its own namespace."""
    annotations = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
    return {
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations if release else {}},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
    }


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(RELEASES[name].values.read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("volcano", "basic.image_tag_version", f"v{RELEASES['volcano'].version}"),
        ("neuron", "devicePlugin.image.tag", read_neuron_nodes()["neuron"].device_plugin),
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


def test_add_ons_are_installed_in_order_marked_and_after_their_definitions(
    run_infra: RunInfra, cluster: Installed
) -> None:
    """helm leaves out the definitions in a chart's folder. They are applied server-side, from the very version. What
    make addons installed before is upgraded.
    """
    kuberay, volcano = RELEASES["kuberay"], RELEASES["volcano"]
    cluster.install(ours=(("volcano", volcano.namespace, "volcano-1.13.0"),))
    scheduler = program("scheduler", volcano.namespace, "docker.io/volcanosh/vc-scheduler:v1.13.0", "volcano")
    cluster.put("deployments,daemonsets", scheduler)

    run_infra("addons")

    assert cluster.upgraded == NAMES
    calls = cluster.programs.calls
    upgrades = [line for line in calls if "upgrade" in line]
    assert all("--atomic" in line and "--version" in line and f"--labels {MARK}" in line for line in upgrades)
    apply = "kubectl apply --server-side --force-conflicts"
    assert calls[-2:] == [upgrades[-1], f"{apply} --kustomize {REPOSITORY / 'k8s/monitoring'}"]
    assert cluster.applied == "definitions of kuberay-operator\ndefinitions of kube-prometheus-stack\n"
    first = calls.index(f"helm show crds kuberay-operator --repo {kuberay.repository} --version {kuberay.version}")
    assert calls[first + 1 : first + 3] == [f"{apply} --filename -", upgrades[0]]


def test_only_those_that_are_named_are_installed(
    run_infra: RunInfra, cluster: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The add-ons are installed in the list's order, whatever the order in ONLY."""
    monkeypatch.setenv("ONLY", "volcano, kubray")
    done = run_infra("addons", exit_code=2)
    assert f"no add-on kubray. Expected names of {', '.join(NAMES)}" in done.stderr
    assert cluster.programs.calls == []

    monkeypatch.setenv("ONLY", "volcano, kuberay")
    run_infra("addons")
    assert cluster.upgraded == ["kuberay", "volcano"]


@pytest.mark.parametrize(
    ("release", "image"),
    [
        (("scheduling", "batch", "volcano-v1.12.0"), "docker.io/volcanosh/vc-scheduler:v1.12.0"),
        (("volcano", "volcano-system", "volcano-1.15.0"), "docker.io/volcanosh/vc-scheduler:v1.15.0"),
        (None, "here:5000/vc-scheduler:v1@sha256:00"),
    ],
    ids=["a release", "a release of the same name and namespace", "no release"],
)
def test_what_somebody_else_installed_is_named_and_left(
    run_infra: RunInfra,
    cluster: Installed,
    monkeypatch: pytest.MonkeyPatch,
    release: tuple[str, str, str] | None,
    image: str,
) -> None:
    name, namespace, chart = release or ("", "batch", "")
    cluster.install(*([release] if release else []))
    other = program("other", "batch", "volcano:1")
    cluster.put("deployments,daemonsets", other, program("scheduler", namespace, image, name))

    refused = run_infra("addons", exit_code=4)

    assert refused.stderr.count("  - ") == 1
    assert f"  - volcano: Deployment scheduler in {namespace}" in refused.stderr
    assert chart in refused.stderr
    assert cluster.upgraded == []
    assert cluster.applied == ""
    rest = "kuberay,neuron,efa,monitoring"
    assert f"make addons ONLY={rest}" in refused.stderr

    monkeypatch.setenv("ONLY", rest)

    run_infra("addons")
    assert cluster.upgraded == rest.split(",")


def test_a_release_that_fails_stops_the_rest_and_is_named(run_infra: RunInfra, cluster: Installed) -> None:
    cluster.answer(helm='[[ "$*" != *"--install volcano"* ]] || { echo "helm: timed out" >&2; exit 1; }')

    done = run_infra("addons", exit_code=4)

    assert cluster.upgraded == ["kuberay", "volcano"]
    assert "timed out" in done.stderr


def test_a_dry_run_shows_what_would_change(
    run_infra: RunInfra, cluster: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    ours = tuple(
        (each.name, each.namespace, f"{each.chart}-0.9") for each in read_releases() if each.name in "kuberay volcano"
    )
    cluster.install(("prometheus", "metrics", "kube-prometheus-stack-80.0.0"), ours=ours)
    operator = program("operator", "metrics", "quay.io/prometheus-operator/prometheus-operator:v0.80", "prometheus")
    cluster.put("deployments,daemonsets", operator)

    done = run_infra("addons")

    assert "helm release prometheus in metrics (kube-prometheus-stack-80.0.0)" in done.stdout
    assert "monitoring 92.21.2: skipped" in done.stdout
    assert "neuron 1.10.0: would be installed\n" in done.stdout
    assert "volcano 1.15.0: volcano-0.9 is installed" in done.stdout
    assert not any("upgrade" in line or "kubectl apply" in line for line in cluster.programs.calls)


@pytest.mark.parametrize("dry_run", ["", "1"])
@pytest.mark.parametrize("has_helm", [False, True])
def test_a_cluster_that_does_not_answer_is_no_new_installation(
    run_infra: RunInfra, cluster: Installed, monkeypatch: pytest.MonkeyPatch, has_helm: bool, dry_run: str
) -> None:
    monkeypatch.setenv("DRY_RUN", dry_run)
    cluster.answer(helm='[[ "$*" != "list"* ]] || { echo "Error: Kubernetes cluster unreachable" >&2; exit 1; }')
    if not has_helm:
        cluster.programs.remove("helm")

    done = run_infra("addons", exit_code=4)

    assert ("Kubernetes cluster unreachable" if has_helm else "https://helm.sh/docs/intro/install") in done.stderr
    assert cluster.upgraded == []
