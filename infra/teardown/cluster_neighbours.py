"""Finds resources of others on the EKS cluster, which neither Millrace, `make addons` nor AWS made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from infra.addons.releases import Installed, list_installed, read_releases
from infra.teardown.neighbours import Neighbour
from infra.workloads.kubernetes_cluster import CloudObject, list_cloud_objects, list_objects

NAMESPACES = ("millrace", "millrace-setup")  # k8s/ makes them; a contract test compares them
# Namespaces of Kubernetes and of EKS' add-ons.
OF_AWS = ("kube-system", "kube-public", "kube-node-lease", "amazon-cloudwatch", "amazon-guardduty")
DEFAULT = "default"  # always exists; somebody uses it if it has pods


@dataclass(frozen=True)
class Owners:
    """Decides who owns an object: by its namespace, and in an add-on's namespace by its helm release."""

    releases: tuple[Installed, ...]

    @property
    def namespaces(self) -> frozenset[str]:
        """Namespaces of Millrace and of the releases of `make addons`."""
        return frozenset({*NAMESPACES, *(each.namespace for each in self.releases if each.is_ours)})

    def has_made(self, found: CloudObject) -> bool:
        """Whether Millrace or `make addons` made this Service or claim."""
        own = {(each.namespace, each.name) for each in self.releases if each.is_ours}
        return found.namespace in NAMESPACES or found.release in own


def read_owners() -> Owners:
    return Owners(tuple(list_installed()))


def find_on_cluster(owners: Owners) -> Iterator[Neighbour]:
    """Resources of others on the cluster, in one request per kind of object."""
    pods = Counter(each["metadata"]["namespace"] for each in list_objects("pods"))
    # An add-on's namespace outlives its release.
    known = {*NAMESPACES, *OF_AWS, DEFAULT, *(release.namespace for release in read_releases())}
    names = sorted(each["metadata"]["name"] for each in list_objects("namespaces"))
    foreign = [name for name in names if name not in known or (name == DEFAULT and pods[name])]
    for name in foreign:
        releases = [each.name for each in owners.releases if each.namespace == name]
        detail = f"{pods[name]} pods" + (f", helm releases {', '.join(releases)}" if releases else "")
        command = "--namespace default delete all --all" if name == DEFAULT else f"delete namespace {name}"
        yield Neighbour("namespace", name, detail, f"kubectl {command}", is_on_cluster=True)
    for release in owners.releases:
        if not release.is_ours and release.namespace not in foreign:
            removal = f"helm --namespace {release.namespace} uninstall {release.name}"
            detail = f"{release.chart} in {release.namespace}"
            yield Neighbour("helm release", release.name, detail, removal, is_on_cluster=True)
    for each in list_cloud_objects():  # whose load balancers and volumes would outlive the cluster in the account
        if not owners.has_made(each):
            detail = f"with a {'load balancer' if each.kind == 'service' else 'volume'} in the account"
            removal = f"kubectl --namespace {each.namespace} delete {each.kind} {each.name}"
            yield Neighbour(each.kind, f"{each.namespace}/{each.name}", detail, removal, is_on_cluster=True)
