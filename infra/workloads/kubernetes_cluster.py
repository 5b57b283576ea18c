"""Reads the EKS cluster with `kubectl`, once it is known to be the right one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from infra.account.session import Account
from infra.child_process import read_output
from services.common.errors import DeviceError

KubernetesObject = dict[str, Any]
# helm writes these annotations on every object of a release.
RELEASE_NAME, RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"


@dataclass(frozen=True)
class CloudObject:
    """A Service or claim for which a controller made a load balancer or volume, which it deletes with the object."""

    kind: str
    namespace: str
    name: str
    release: tuple[str, str] | None
    """Namespace and name of the helm release that contains the object."""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def find_endpoint(account: Account, cluster: str) -> str | None:
    """Address of the cluster's API; None if the cluster does not exist."""
    found = account.find("eks", "describe_cluster", name=cluster)
    return None if found is None else str(found["cluster"].get("endpoint") or "")


def require_context(account: Account, cluster: str) -> None:
    """Raises `DeviceError` unless KUBECONFIG's current context is this cluster, before another one is changed."""
    endpoint = find_endpoint(account, cluster) or ""
    configured = run_kubectl(["config", "view", "--minify", "--output", "json"])
    clusters = json.loads(configured)["clusters"] if configured.strip() else []
    server = clusters[0]["cluster"]["server"] if clusters else "none"
    if server.rstrip("/") != endpoint.rstrip("/"):
        raise DeviceError(
            f"kubectl talks to {server}, and {cluster} is at {endpoint}. "
            f"Run aws eks update-kubeconfig --region {account.region} --name {cluster}, then the same command again"
        )


def list_objects(*kinds: str) -> list[KubernetesObject]:
    """Lists all objects of the kinds, in every namespace."""
    if not kinds:
        return []
    answer = run_kubectl(["get", ",".join(kinds), "--all-namespaces", "--output", "json"])
    items: list[KubernetesObject] = json.loads(answer)["items"] if answer.strip() else []
    return items


def list_cloud_objects() -> list[CloudObject]:
    """Services with a load balancer, and claims for which a driver made a volume; no claims on an existing volume."""
    services = [each for each in list_objects("services") if each["spec"].get("type") == "LoadBalancer"]
    claims = [each for each in list_objects("persistentvolumeclaims") if each["spec"].get("storageClassName") != ""]
    return [
        CloudObject(kind, each["metadata"]["namespace"], each["metadata"]["name"], release_of(each))
        for kind, found in (("service", services), ("persistentvolumeclaim", claims))
        for each in found
    ]


def release_of(found: KubernetesObject) -> tuple[str, str] | None:
    """Namespace and name of the helm release that contains the object."""
    annotations = found["metadata"].get("annotations") or {}
    if RELEASE_NAME not in annotations:
        return None
    return annotations.get(RELEASE_NAMESPACE, ""), annotations[RELEASE_NAME]


def run_kubectl(arguments: list[str], written: str = "") -> str:
    """Runs kubectl with `written` as its standard input. Raises `DeviceError` with kubectl's message."""
    advice = (
        "Check that the cluster's API is reachable from here (api_public_cidrs), and that you administer the cluster: "
        "whoever ran infra-up first does, and the stack's administrators do. Operators cannot read all namespaces"
    )
    return read_output("kubectl", *arguments, written=written, advice=advice)
