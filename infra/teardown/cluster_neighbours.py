"""Who made what on the EKS cluster: Millrace, `make addons`, AWS, or somebody else."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from infra.addons.installed import Installed, list_installed
from infra.addons.releases import read_releases
from infra.teardown.neighbours import Neighbour, Place
from infra.workloads.kubernetes_cluster import Maker, list_makers, list_things

NAMESPACES = ("millrace", "millrace-setup")  # that k8s/ makes; the contract test holds them together
# Kubernetes' own, and those of EKS' add-ons.
OF_AWS = ("kube-system", "kube-public", "kube-node-lease", "amazon-cloudwatch", "amazon-guardduty")
DEFAULT = "default"  # always there, so that it is somebody's where pods are in it
NODE_GROUP_LABEL = "eks.amazonaws.com/nodegroup"
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Owners:
    """Whose a thing is, by its namespace, and in an add-on's namespace by its helm release."""

    releases: tuple[Installed, ...]

    @property
    def namespaces(self) -> frozenset[str]:
        """Those in which Millrace or a release of `make addons` is."""
        return frozenset({*NAMESPACES, *(each.namespace for each in self.releases if each.is_ours)})

    @property
    def own_releases(self) -> frozenset[tuple[str, str]]:
        """Namespace and name of each release of `make addons`."""
        return frozenset((each.namespace, each.name) for each in self.releases if each.is_ours)

    def has_made(self, maker: Maker) -> bool:
        """Did Millrace or `make addons` make this Service or claim?"""
        return maker.namespace in NAMESPACES or maker.release in self.own_releases


def read_owners() -> Owners:
    """Ask helm, twice, for the releases on the cluster. Without helm it prints that none is known."""
    if shutil.which("helm") is None:
        print("add-ons     no helm here: releases are not looked at, neither make addons' nor others'", flush=True)
        return Owners(())
    return Owners(tuple(list_installed()))


def find_on_cluster(owners: Owners) -> list[Neighbour]:
    """What is somebody else's on the cluster, with one question to its API for each kind of object."""
    pods = Counter(each["metadata"]["namespace"] for each in list_things("pods"))
    foreign = _foreign_namespaces(pods)
    return [*_namespaces(foreign, pods, owners), *_releases(foreign, owners), *_makers(owners)]


def find_pods_by_node_group(owners: Owners) -> dict[str, list[str]]:
    """Namespace/name of somebody else's running pods on managed node groups, by the group.

    A pod that a DaemonSet makes for each node does not count: it goes with its node.
    """
    groups = {
        each["metadata"]["name"]: (each["metadata"].get("labels") or {}).get(NODE_GROUP_LABEL, "")
        for each in list_things("nodes")
    }
    known = {*owners.namespaces, *OF_AWS}
    found: dict[str, list[str]] = defaultdict(list)
    for each in list_things("pods"):
        metadata = each["metadata"]
        group = groups.get(each["spec"].get("nodeName", ""))
        kinds = {owner["kind"] for owner in metadata.get("ownerReferences") or []}
        is_running = each.get("status", {}).get("phase") not in ENDED
        if group and is_running and metadata["namespace"] not in known and "DaemonSet" not in kinds:
            found[group].append(f"{metadata['namespace']}/{metadata['name']}")
    return found


def _foreign_namespaces(pods: Counter[str]) -> list[str]:
    """An add-on's namespace outlives its release, and is nobody's: what others have in it is named itself."""
    known = {*NAMESPACES, *OF_AWS, DEFAULT, *(release.namespace for release in read_releases())}
    names = sorted(each["metadata"]["name"] for each in list_things("namespaces"))
    return [name for name in names if name not in known or (name == DEFAULT and pods[name])]


def _namespaces(foreign: list[str], pods: Counter[str], owners: Owners) -> Iterator[Neighbour]:
    for name in foreign:
        releases = [each.name for each in owners.releases if each.namespace == name]
        detail = f"{pods[name]} pods" + (f", helm releases {', '.join(releases)}" if releases else "")
        removal = "kubectl --namespace default delete all --all"
        yield Neighbour(
            "namespace",
            name,
            detail,
            Place.CLUSTER,
            removal if name == DEFAULT else f"kubectl delete namespace {name}",
        )


def _releases(foreign: list[str], owners: Owners) -> Iterator[Neighbour]:
    """Those in a namespace that is somebody's are named with it."""
    for each in owners.releases:
        if not each.is_ours and each.namespace not in foreign:
            removal = f"helm --namespace {each.namespace} uninstall {each.name}"
            yield Neighbour("helm release", each.name, f"{each.chart} in {each.namespace}", Place.CLUSTER, removal)


def _makers(owners: Owners) -> Iterator[Neighbour]:
    """Each is named beside its namespace: what a controller made for it in the account would outlive the cluster."""
    for each in list_makers():
        if not owners.has_made(each):
            made = "load balancer" if each.kind == "service" else "volume"
            removal = f"kubectl --namespace {each.namespace} delete {each.kind} {each.name}"
            name = f"{each.namespace}/{each.name}"
            yield Neighbour(each.kind, name, f"with a {made} in the account", Place.CLUSTER, removal)
