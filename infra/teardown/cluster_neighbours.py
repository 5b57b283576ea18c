"""Finds resources of others on the EKS cluster, which neither Millrace, `make addons` nor AWS made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from infra.addons.releases import list_installed, read_releases
from infra.teardown.neighbours import Neighbour
from infra.workloads.kubernetes_cluster import list_cloud_objects, list_objects

NAMESPACES = ("millrace", "millrace-setup")  # k8s/ makes them; a contract test compares them
# Namespaces of Kubernetes and of EKS' add-ons.
OF_AWS = ("kube-system", "kube-public", "kube-node-lease", "amazon-cloudwatch", "amazon-guardduty")
DEFAULT = "default"  # always exists; somebody uses it if it has pods


def find_on_cluster() -> Iterator[Neighbour]:
    """Resources of others on the cluster, in one request per kind of object."""
    installed = list_installed()
    pods = Counter(each["metadata"]["namespace"] for each in list_objects("pods"))
    # An add-on's namespace outlives its release.
    known = {*NAMESPACES, *OF_AWS, DEFAULT, *(release.namespace for release in read_releases())}
    names = sorted(each["metadata"]["name"] for each in list_objects("namespaces"))
    foreign = [name for name in names if name not in known or (name == DEFAULT and pods[name])]
    for name in foreign:
        releases = [each.name for each in installed if each.namespace == name]
        detail = f"{pods[name]} pods" + (f", helm releases {', '.join(releases)}" if releases else "")
        command = "--namespace default delete all --all" if name == DEFAULT else f"delete namespace {name}"
        yield Neighbour("namespace", name, detail, f"kubectl {command}", is_on_cluster=True)
    for release in installed:
        if not release.is_ours and release.namespace not in foreign:
            removal = f"helm --namespace {release.namespace} uninstall {release.name}"
            detail = f"{release.chart} in {release.namespace}"
            yield Neighbour("helm release", release.name, detail, removal, is_on_cluster=True)
    own = {(each.namespace, each.name) for each in installed if each.is_ours}
    for each in list_cloud_objects():  # whose load balancers and volumes would outlive the cluster in the account
        if each.namespace not in NAMESPACES and each.release not in own:
            detail = f"with a {'load balancer' if each.kind == 'service' else 'volume'} in the account"
            removal = f"kubectl --namespace {each.namespace} delete {each.kind} {each.name}"
            yield Neighbour(each.kind, f"{each.namespace}/{each.name}", detail, removal, is_on_cluster=True)
