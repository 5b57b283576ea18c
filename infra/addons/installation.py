"""Installs, compares and removes the cluster's add-ons with helm, which talks to the cluster of KUBECONFIG."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from images.registry import repository_of
from infra.addons.releases import MARK, MARKED, TIMEOUT, Release
from infra.child_process import find_program, read_output, run_to_its_end
from infra.workloads.kubernetes_cluster import list_objects, release_of, run_kubectl
from services.common.errors import DeviceError

# All states except that of removed releases whose history is kept. helm 4 has no --all.
STATES = ("--deployed", "--failed", "--pending", "--uninstalling")
REVISION = "rollme/helm-revision:"  # Volcano's chart writes the release's revision into a pod
DIFFERS = 1  # exit code of kubectl diff if there is a difference
# Server-side, because definitions and dashboards are too long for the annotation of a client-side apply; with force,
# because helm owns the fields that it created.
SERVER_SIDE = ["--server-side", "--force-conflicts"]


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
    """Prints what `install_releases` would change, as a diff of manifests.

    The cluster renders the chart, so a chart that queries the cluster's API gets the same answers as at installation.
    """
    installed = list_installed()
    others, there = _find_others(releases, installed), {(each.name, each.namespace) for each in installed}
    for release in releases:
        title = f"{release.name} {release.version}"
        if found := others.get(release.name):
            print(f"{title}: skipped, because make addons did not install it", *found, sep="\n  ")
        elif (release.name, release.namespace) not in there:
            print(f"{title}: would be installed")
        elif difference := list(_list_differences(release)):
            print(f"{title}: would change", *difference, sep="\n")
        else:
            print(f"{title}: is installed like this")


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


def _list_differences(release: Release) -> Iterator[str]:
    if release.crds == "folder":
        shown = _diff(["--filename", "-"], _run_helm("show", "crds", *release.source))
        # Names alone, because KubeRay's definitions have 71,000 lines.
        yield from (f"definition {name} differs" for name in re.findall(r"^\+\+\+ \S*\.\.(\S+)", shown, re.MULTILINE))
    before = _run_helm("get", "manifest", release.name, "--namespace", release.namespace)
    after = json.loads(_run_helm(*release.upgrade, "--dry-run=server", "--output", "json"))["manifest"]
    old, new = ([line for line in side.strip().splitlines() if REVISION not in line] for side in (before, after))
    yield from difflib.unified_diff(old, new, "installed", "addons.yaml", lineterm="")
    if release.manifests:
        yield from _diff(release.kustomization).splitlines()


def _diff(manifests: list[str], written: str = "") -> str:
    return run_kubectl(["diff", *SERVER_SIDE, *manifests], written, good_codes=(0, DIFFERS))


def _run_helm(*arguments: str) -> str:
    return read_output("helm", *arguments, advice="kubectl get namespaces shows whether the cluster answers")


def _failure(release: Release, exit_code: int, outcome: str) -> DeviceError:
    return DeviceError(
        f"helm ended with {exit_code}; its output is above. {release.name} {outcome}. Run the same command again to "
        f"continue; kubectl -n {release.namespace} get pods,events shows what a release waits for"
    )
