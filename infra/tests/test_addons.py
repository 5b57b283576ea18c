"""The add-ons are the versions that are tested, fit what the manifests need, and helm is called as it has to be."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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
WHERE = "--namespace {} --create-namespace --values {} --atomic --timeout 10m"
NAMES = ["kuberay-operator", "volcano", "neuron", "efa", "monitoring"]


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

    assert re.search(r"kuberay/ray-operator v(\S+)", modules)[1] == versions["kuberay-operator"]  # type: ignore[index]
    assert re.search(r"volcano.sh/volcano v(\S+)", modules)[1] == versions["volcano"]  # type: ignore[index]
    assert values_of("volcano")["basic"]["image_tag_version"] == f"v{versions['volcano']}"


def test_the_device_plugin_is_of_the_images_sdk() -> None:
    platforms = tomllib.loads((REPOSITORY / "images/platforms.toml").read_text(encoding="utf-8"))

    assert values_of("neuron")["devicePlugin"]["image"]["tag"] == platforms["neuron"]["node"]["device_plugin"]


def test_the_operator_has_no_batch_scheduler_of_its_own() -> None:
    assert values_of("kuberay-operator")["batchScheduler"] == {"enabled": False, "name": ""}


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
    """By Terraform, from EKS's catalogue."""
    assert [release.name for release in read_releases()] == NAMES


def test_a_dry_run_prints_the_commands(
    capfd: pytest.CaptureFixture[str], programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "1")

    done = call(capfd, "infra.__main__", "addons")

    repositories = {
        "kuberay-operator": "kuberay-operator --repo https://ray-project.github.io/kuberay-helm/",
        "volcano": "volcano --repo https://volcano-sh.github.io/helm-charts",
        "neuron": "oci://public.ecr.aws/neuron/neuron-helm-chart",
        "efa": "aws-efa-k8s-device-plugin --repo https://aws.github.io/eks-charts",
        "monitoring": "kube-prometheus-stack --repo https://prometheus-community.github.io/helm-charts",
    }
    versions = ["1.6.1", "1.14.1", "1.9.0", "v0.5.30", "92.21.2"]
    namespaces = ["kuberay-system", "volcano-system", "kube-system", "kube-system", "monitoring"]
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"helm upgrade --install {name} {repositories[name]} --version {version} "
        + WHERE.format(namespace, ADDONS / "values" / f"{name}.yaml")
        for name, version, namespace in zip(NAMES, versions, namespaces, strict=True)
    ]


def test_without_helm_it_ends_with_4_and_says_where_to_get_it(
    capfd: pytest.CaptureFixture[str], programs: Programs
) -> None:
    for command in ("addons", "addons-diff"):
        done = call(capfd, "infra.__main__", command)

        assert done.returncode == 4
        assert done.stdout == ""
        assert "https://helm.sh/docs/intro/install" in done.stderr


def test_add_ons_are_installed_in_order(capfd: pytest.CaptureFixture[str], programs: Programs) -> None:
    programs.add("helm")

    assert call(capfd, "infra.__main__", "addons").returncode == 0

    assert [line.split()[3] for line in programs.calls] == NAMES
    assert all("--atomic" in line and "--version" in line for line in programs.calls)


def test_a_release_that_fails_stops_the_rest_and_is_named(
    capfd: pytest.CaptureFixture[str], programs: Programs
) -> None:
    programs.add("helm", '[[ "$*" != *volcano* ]] || { echo "helm: timed out" >&2; exit 1; }')

    done = call(capfd, "infra.__main__", "addons")

    assert done.returncode == 4
    assert [line.split()[3] for line in programs.calls] == ["kuberay-operator", "volcano"]
    assert "timed out" in done.stderr
    assert "volcano was rolled back" in done.stderr
    assert "kubectl -n volcano-system get pods,events" in done.stderr


def test_a_diff_shows_what_would_change(capfd: pytest.CaptureFixture[str], programs: Programs) -> None:
    programs.add(
        "helm",
        """
case "$*" in
"get manifest volcano"*) echo "Error: release: not found" >&2; exit 1 ;;
"get manifest efa"*) echo "image: v0.5.20" ;;
"get manifest"*) echo "kind: Same" ;;
*"--install efa"*) echo '{"manifest": "image: v0.5.30\\n"}' ;;
*) echo '{"manifest": "kind: Same\\n"}' ;;
esac""",
    )

    done = call(capfd, "infra.__main__", "addons-diff")

    assert done.returncode == 0, done.stderr
    assert "kuberay-operator 1.6.1: as it is installed" in done.stdout
    assert "volcano 1.14.1: would change\n--- installed\n+++ addons.yaml\n" in done.stdout
    assert "-image: v0.5.20\n+image: v0.5.30\n" in done.stdout
    assert not any("--atomic" in line for line in programs.calls)
    assert all("--dry-run=server" in line for line in programs.calls if "upgrade" in line)


def test_a_cluster_that_does_not_answer_is_no_new_installation(
    capfd: pytest.CaptureFixture[str], programs: Programs
) -> None:
    programs.add("helm", 'echo "Error: Kubernetes cluster unreachable" >&2; exit 1')

    done = call(capfd, "infra.__main__", "addons-diff")

    assert done.returncode == 4
    assert "Kubernetes cluster unreachable" in done.stderr


def test_argo_cd_gets_the_same_list(capfd: pytest.CaptureFixture[str]) -> None:
    done = call(capfd, "infra.__main__", "addons-argocd")

    applications = list(yaml.safe_load_all(done.stdout))
    assert [each["kind"] for each in applications] == ["Application"] * len(NAMES)
    for application, release in zip(applications, read_releases(), strict=True):
        source = application["spec"]["source"]
        assert source["targetRevision"] == release.version
        assert source["helm"] == {"releaseName": release.name, "valuesObject": values_of(release.name)}
        assert not source["repoURL"].startswith("oci://")
        assert application["spec"]["destination"]["namespace"] == release.namespace


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_signal_lets_helm_roll_back(
    programs: Programs, tmp_path: Path, signum: signal.Signals, exit_code: int
) -> None:
    """Killed, it would leave a release that no later upgrade may touch."""
    began, ended = tmp_path / "began", tmp_path / "ended"
    programs.add(
        "helm",
        f"""trap 'echo rolled back >>"{ended}"; exit 1' INT
echo began >"{began}"
while :; do sleep 0.05; done""",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "infra", "addons"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 60
    while not began.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signum)
    _, words = process.communicate(timeout=60)

    assert process.returncode == exit_code
    assert ended.read_text(encoding="utf-8") == "rolled back\n"
    assert "the same command continues" in words
    assert len(programs.calls) == 1
