"""Installs, compares and removes the cluster's add-ons: the helm releases of `addons.yaml`.

helm and kubectl talk to the cluster of KUBECONFIG.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from images.registry import repository_of
from infra.child_process import find_program, read_output, run_to_its_end
from infra.workloads.kubernetes_cluster import list_objects, release_of, run_kubectl
from services.common.errors import DeviceError, RecipeError

ADDONS = Path(__file__).parent
REPOSITORY = ADDONS.parents[1]
TIMEOUT = "10m"
# helm keeps this label on a release's Secret.
MARK, MARKED = "millrace.dev/installed-by", "make-addons"
# All states except that of removed releases whose history is kept. helm 4 has no --all.
STATES = ("--deployed", "--failed", "--pending", "--uninstalling")
# Server-side, because definitions and dashboards are too long for the annotation of a client-side apply; with force,
# because helm owns the fields that it created.
SERVER_SIDE = ["--server-side", "--force-conflicts"]


@dataclass(frozen=True)
class Release:
    """A helm release of `addons.yaml`."""

    name: str
    chart: str
    repository: str
    """Address of a chart repository, or of a registry after `oci://`."""
    version: str
    namespace: str
    images: tuple[str, ...]
    """The last parts of image names that only this add-on runs."""
    crds: str = ""
    """Place of the chart's custom resource definitions: `folder`, `templates`, or empty where it has none."""
    manifests: str = ""
    """Folder of a kustomization in this repository that belongs to the release; empty where there is none."""

    @property
    def values(self) -> Path:
        return ADDONS / "values" / f"{self.name}.yaml"

    @property
    def source(self) -> list[str]:
        """Arguments of helm that name the chart and its version."""
        is_oci = self.repository.startswith("oci://")
        chart = [f"{self.repository}/{self.chart}"] if is_oci else [self.chart, "--repo", self.repository]
        return [*chart, "--version", self.version]

    @property
    def upgrade(self) -> list[str]:
        """Arguments of helm that install the release, or upgrade the installed one to this version and these values."""
        where = ["--namespace", self.namespace, "--create-namespace"]
        mark = ["--labels", f"{MARK}={MARKED}"]
        return ["upgrade", "--install", self.name, *self.source, *where, "--values", str(self.values), *mark]

    @property
    def kustomization(self) -> list[str]:
        """Arguments of kubectl that name the release's own manifests."""
        return ["--kustomize", str(REPOSITORY / self.manifests)]


def read_releases() -> list[Release]:
    """Reads all add-ons, in the order of installation."""
    table = yaml.safe_load((ADDONS / "addons.yaml").read_text(encoding="utf-8"))["releases"]
    return [Release(**entry | {"images": tuple(entry["images"])}) for entry in table]


def choose_releases(releases: list[Release], only: str) -> list[Release]:
    """The add-ons that `only` names, separated by commas, in the order of installation; all of them if it is empty.

    Raises `RecipeError` for a name that no add-on has.
    """
    chosen, names = {name.strip() for name in only.split(",")} - {""}, [release.name for release in releases]
    if unknown := chosen - {*names}:
        raise RecipeError(f"ONLY={only}: no add-on {', '.join(unknown)}. Expected names of {', '.join(names)}")
    return [release for release in releases if release.name in chosen or not chosen]


@dataclass(frozen=True)
class Installed:
    """A helm release on the cluster."""

    name: str
    namespace: str
    chart: str
    """Name and version as helm prints them, such as `volcano-1.14.1`."""
    is_ours: bool
    """Whether `make addons` installed it."""

    def __str__(self) -> str:
        return f"helm release {self.name} in {self.namespace} ({self.chart})"


def install_releases(releases: list[Release]) -> None:
    """Installs or upgrades the releases in order, and stops at the first failure, which helm rolls back.

    Raises `DeviceError`, before anything is installed, if somebody else has installed one of the add-ons.
    """
    if others := _find_others(releases, list_installed()):
        raise DeviceError(_describe_others(releases, others))
    for release in releases:
        print(f"== {release.name} {release.version} in {release.namespace}", flush=True)
        if release.crds == "folder":
            definitions = _run_helm("show", "crds", *release.source)
            print(run_kubectl(["apply", *SERVER_SIDE, "--filename", "-"], definitions), end="", flush=True)
        if exit_code := run_to_its_end([find_program("helm"), *release.upgrade, "--atomic", "--timeout", TIMEOUT]):
            raise _failure(release, exit_code, "was rolled back; the add-ons before it stay")
        if release.manifests:
            print(run_kubectl(["apply", *SERVER_SIDE, *release.kustomization]), end="", flush=True)


def print_differences(releases: list[Release]) -> None:
    """Prints for each release what `install_releases` would do."""
    installed = list_installed()
    others, charts = _find_others(releases, installed), {(each.namespace, each.name): each.chart for each in installed}
    for release in releases:
        title, chart = f"{release.name} {release.version}", charts.get((release.namespace, release.name))
        if found := others.get(release.name):
            print(f"{title}: skipped, because make addons did not install it", *found, sep="\n  ")
        elif chart is None:
            print(f"{title}: would be installed")
        else:
            print(f"{title}: {chart} is installed, and would get this version and {release.values}")


def remove_releases(releases: list[Release], installed: list[Installed]) -> None:
    """Removes the releases that `make addons` installed, in reverse order."""
    ours = {(each.namespace, each.name) for each in installed if each.is_ours}
    for release in reversed(releases):
        if (release.namespace, release.name) not in ours:
            continue
        print(f"removing    {release.name} from {release.namespace}", flush=True)
        if release.manifests:
            run_kubectl(["delete", "--ignore-not-found", *release.kustomization])
        options = ["--namespace", release.namespace, "--ignore-not-found", "--wait", "--timeout", TIMEOUT]
        if exit_code := run_to_its_end([find_program("helm"), "uninstall", release.name, *options]):
            raise _failure(release, exit_code, "may still be installed")


def list_installed() -> list[Installed]:
    """The releases in all namespaces. Raises `DeviceError` if helm is missing or fails."""
    command = ["list", "--all-namespaces", *STATES, "--max", "0", "--output", "json"]
    everyone, ours = (
        json.loads(_run_helm(*command, *more) or "[]") or [] for more in ([], ["--selector", f"{MARK}={MARKED}"])
    )
    marked = {(each["namespace"], each["name"]) for each in ours}
    return [
        Installed(each["name"], each["namespace"], each["chart"], (each["namespace"], each["name"]) in marked)
        for each in everyone
    ]


def _find_others(releases: list[Release], installed: list[Installed]) -> dict[str, list[str]]:
    """Describes the programs of others that run an add-on's images, by the add-on's name."""
    ours = {(each.namespace, each.name) for each in installed if each.is_ours}
    named: dict[tuple[str, str] | None, str] = {(each.namespace, each.name): f" of {each}" for each in installed}
    programs = [each for each in list_objects("deployments", "daemonsets") if release_of(each) not in ours]
    others = {}
    for release in releases:
        endings = tuple(f"/{name}" for name in release.images)
        found = [
            f"{each['kind']} {each['metadata']['name']} in {each['metadata']['namespace']}, which runs "
            f"{container['image']}{named.get(release_of(each), '')}"
            for each in programs
            for container in each["spec"]["template"]["spec"]["containers"]
            if f"/{repository_of(container['image'])}".endswith(endings)
        ]
        if found:
            others[release.name] = found
    return others


def _describe_others(releases: list[Release], others: dict[str, list[str]]) -> str:
    lines = [f"\n  - {name}: {each}" for name, found in others.items() for each in found]
    free = [release.name for release in releases if release.name not in others]
    only = f"make addons ONLY={','.join(free)} installs the others. " if free else ""
    return (
        f"{' and '.join(others)}: already on the cluster, but not installed by make addons. Two installations of an "
        f"add-on undo each other's work, so nothing was installed:{''.join(lines)}\n{only}"
        f"docs/operations/existing-cluster.md says which versions and settings Millrace needs. To let make addons take "
        f"over a release: kubectl --namespace NAMESPACE label secret --selector owner=helm,name=RELEASE {MARK}={MARKED}"
    )


def _run_helm(*arguments: str) -> str:
    return read_output("helm", *arguments, advice="kubectl get namespaces shows whether the cluster answers")


def _failure(release: Release, exit_code: int, outcome: str) -> DeviceError:
    return DeviceError(
        f"helm ended with {exit_code}; its output is above. {release.name} {outcome}. Run the same command again to "
        f"continue; kubectl -n {release.namespace} get pods,events shows what a release waits for"
    )
