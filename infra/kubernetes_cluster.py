"""The EKS cluster as `kubectl` reaches it: that it is the right one, and what on it made things in the account."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from infra.account import Account, is_absent
from services.common.errors import DeviceError


@dataclass(frozen=True)
class MadeByCluster:
    """An object whose deletion lets a controller delete something in the account."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def find_endpoint(account: Account, cluster: str) -> str | None:
    """Address of the cluster's API; None where there is no such cluster."""
    try:
        found = account.client("eks").describe_cluster(name=cluster)["cluster"]
    except ClientError as error:
        if is_absent(error):
            return None
        raise
    endpoint: str = found.get("endpoint") or ""
    return endpoint


def require_context(account: Account, cluster: str, endpoint: str) -> None:
    """Raises `DeviceError` unless KUBECONFIG's current context is that cluster: everything below would hit another."""
    configured = _kubectl(["config", "view", "--minify", "--output", "json"])
    clusters = json.loads(configured)["clusters"] if configured.strip() else []
    server = clusters[0]["cluster"]["server"] if clusters else "none"
    if server.rstrip("/") != endpoint.rstrip("/"):
        raise DeviceError(
            f"kubectl talks to {server}, and {cluster} is at {endpoint}. "
            f"aws eks update-kubeconfig --region {account.region} --name {cluster}, then the same command again"
        )


def has_raycluster(namespace: str) -> bool:
    kinds = _kubectl(["api-resources", "--api-group=ray.io", "--output", "name"])
    if "rayclusters.ray.io" not in kinds.split():
        return False
    return bool(_kubectl(["--namespace", namespace, "get", "rayclusters", "--output", "name"]).strip())


def list_made() -> list[MadeByCluster]:
    """Services with a load balancer, and claims whose volume a driver made; no claims on a volume that was given."""
    services = [
        MadeByCluster("service", each["metadata"]["namespace"], each["metadata"]["name"])
        for each in _list("services")
        if each["spec"].get("type") == "LoadBalancer"
    ]
    claims = [
        MadeByCluster("persistentvolumeclaim", each["metadata"]["namespace"], each["metadata"]["name"])
        for each in _list("persistentvolumeclaims")
        if each["spec"].get("storageClassName") != ""
    ]
    return [*services, *claims]


def delete(made: MadeByCluster) -> None:
    """Ask for it; a claim stays until its pods are gone."""
    _kubectl(["--namespace", made.namespace, "delete", made.kind, made.name, "--ignore-not-found", "--wait=false"])


def _list(kind: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(_kubectl(["get", kind, "--all-namespaces", "--output", "json"]))["items"]
    return items


def _kubectl(arguments: list[str]) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise DeviceError("no kubectl on PATH. Get 1.27 or newer from https://kubernetes.io/docs/tasks/tools")
    done = subprocess.run([kubectl, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(
            f"kubectl {' '.join(arguments[:4])} ended with {done.returncode}: {done.stderr.strip()}. Is the cluster's "
            f"API reached from here (api_public_cidrs), and are you an administrator of the cluster? Who ran infra-up "
            f"first is one, and who is among the stack's administrators; operators may not look into every namespace"
        )
    return done.stdout
