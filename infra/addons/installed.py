"""Finds the add-ons that are already on the cluster, who installed them, and who uses them.

The user installs helm; like kubectl it talks to the cluster of KUBECONFIG.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from images.registry import repository_of
from infra.addons.releases import MARK, MARKED, Release
from infra.workloads.kubernetes_cluster import list_kinds, list_things, release_of
from services.common.errors import DeviceError

Thing = dict[str, Any]
PART_OF, MILLRACE = "app.kubernetes.io/part-of", "millrace"  # on every object of k8s/base
# Volcano itself makes these queues.
BUILT_IN_QUEUES = ("default", "root")
# All states except that of removed releases whose history is kept. helm 4 has no --all.
STATES = ("--deployed", "--failed", "--pending", "--uninstalling")


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


def list_installed() -> list[Installed]:
    """The releases in all namespaces. Raises `DeviceError` if helm is missing or fails."""
    ours = {(each["namespace"], each["name"]) for each in _list_releases("--selector", f"{MARK}={MARKED}")}
    return [
        Installed(each["name"], each["namespace"], each["chart"], (each["namespace"], each["name"]) in ours)
        for each in _list_releases()
    ]


def find_others(releases: list[Release], installed: list[Installed]) -> dict[str, list[str]]:
    """Describes what somebody else has installed of these add-ons, by the add-on's name.

    The answer leaves out add-ons that `make addons` installed, and those of which the cluster has nothing: no release
    with their name or chart, no program that runs their images, no definition of their kinds.
    """
    ours = {(each.namespace, each.name) for each in installed if each.is_ours}
    wanted = [release for release in releases if (release.namespace, release.name) not in ours]
    programs = list_things("deployments", "daemonsets") if wanted else []
    definitions = list_things("customresourcedefinitions") if wanted else []
    others = {}
    for release in wanted:
        taken = [each for each in installed if not each.is_ours and _is_alike(each, release)]
        known = ours | {(each.namespace, each.name) for each in taken}
        found = [*map(str, taken), *_programs_of(release, programs, known)]
        if found := found or _definitions_of(release, definitions, known):
            others[release.name] = found
    return others


def find_users(release: Release, own_namespaces: Collection[str], ours: Collection[tuple[str, str]]) -> list[str]:
    """Objects of an add-on's kinds that belong neither to Millrace nor to an add-on, and depend on this add-on."""
    kinds = [kind for group in release.groups for kind in list_kinds(group)]
    return [
        f"{each['kind']} {'/'.join(filter(None, (each['metadata'].get('namespace'), each['metadata']['name'])))}"
        for each in list_things(*kinds)
        if each["metadata"].get("namespace") not in own_namespaces
        and release_of(each) not in ours
        and not _is_built_in(each)
    ]


def find_helm() -> str:
    helm = shutil.which("helm")
    if helm is None:
        raise DeviceError(
            "no helm on PATH, which installs the cluster's add-ons. Get 3.13 or newer from "
            "https://helm.sh/docs/intro/install"
        )
    return helm


def _list_releases(*options: str) -> list[Thing]:
    command = [find_helm(), "list", "--all-namespaces", *STATES, "--max", "0", *options, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(
            f"helm list ended with {done.returncode}: {done.stderr.strip()}. Without the list of releases no add-on "
            f"was installed or removed. kubectl get namespaces shows whether the cluster answers"
        )
    found: list[Thing] = json.loads(done.stdout or "[]") or []
    return found


def _is_alike(installed: Installed, release: Release) -> bool:
    return installed.name == release.name or bool(re.fullmatch(rf"{re.escape(release.chart)}-v?\d.*", installed.chart))


def _programs_of(release: Release, programs: list[Thing], known: Collection[tuple[str, str]]) -> list[str]:
    return [
        f"{each['kind']} {each['metadata']['name']} in {each['metadata']['namespace']}, which runs {image}"
        for each in programs
        if release_of(each) not in known
        for image in [container["image"] for container in each["spec"]["template"]["spec"]["containers"]]
        if any(f"/{repository_of(image)}".endswith(f"/{name}") for name in release.images)
    ]


def _definitions_of(release: Release, definitions: list[Thing], known: Collection[tuple[str, str]]) -> list[str]:
    names = [
        each["metadata"]["name"]
        for each in definitions
        if each["spec"]["group"] in release.groups
        and (each["metadata"].get("labels") or {}).get(MARK) != MARKED
        and release_of(each) not in known
    ]
    return [f"custom resource definitions without a release: {', '.join(names)}"] if names else []


def _is_built_in(thing: Thing) -> bool:
    is_ours = (thing["metadata"].get("labels") or {}).get(PART_OF) == MILLRACE
    is_volcanos = thing["kind"] == "Queue" and thing["metadata"]["name"] in BUILT_IN_QUEUES
    return is_ours or is_volcanos or (thing["kind"] != "Queue" and "namespace" not in thing["metadata"])
