"""The calls of the Kubernetes API that client and controller make, with errors that say what was asked for, and the
conditions in the status of its objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes
import kubernetes.stream
import kubernetes.watch
import urllib3
import urllib3.exceptions
import yaml
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ResourceNotFoundError

from k8s.objects.names import NAMESPACE
from services.common.errors import DeviceError

Object = dict[str, Any]

API_VERSIONS = {
    "Namespace": "v1",
    "Node": "v1",
    "Pod": "v1",
    "Event": "v1",
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
    "Lease": "coordination.k8s.io/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "PodGroup": "scheduling.volcano.sh/v1beta1",
    "Queue": "scheduling.volcano.sh/v1beta1",
}
LOCAL_KUBECONFIG = Path(".cluster/kubeconfig")  # `make cluster-local` writes it
TIMEOUT_SECONDS = 30.0
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""Seconds without a line after which a log stream ends, and its reader asks for the log again."""
FIELD_MANAGER = "millrace"
ASK_FOR_RIGHTS = "For a missing right, ask an administrator for the group millrace-deployers (k8s/README.md)"


class ApiUnreachable(DeviceError):
    """The API server does not answer at the moment."""


class KindAbsent(DeviceError):
    """The API server does not know a type, because its operator is not installed."""


class Conflict(DeviceError):
    """The object exists already, or somebody has changed it since it was read."""


class Api:
    """A client for the objects of one namespace and for cluster-wide objects, which it passes as JSON objects."""

    def __init__(self, client: kubernetes.client.ApiClient, namespace: str = NAMESPACE) -> None:
        self.namespace = namespace
        self.server = str(client.configuration.host)
        self._client = client
        with _explained(self.server):
            self._dynamic = DynamicClient(client)

    def within(self, namespace: str) -> Api:
        """A client of the same server for the objects of another namespace."""
        return self if namespace == self.namespace else Api(self._client, namespace)

    def find(self, kind: str, name: str) -> Object | None:
        """Read an object; None if it does not exist."""
        try:
            return self._call("get", kind, name, name=name)
        except _Absent:
            return None

    def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Object]:
        """List objects by label selector and field selector."""
        return list(self._call("get", kind, label_selector=selector, field_selector=fields)["items"])

    def create(self, body: Object) -> Object:
        """Create an object. Raises `Conflict` when one of that name exists."""
        return self._call("create", body["kind"], body["metadata"].get("name", ""), body["apiVersion"], body=body)

    def merge(self, kind: str, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch. Raises `Conflict` when the resourceVersion in it is no longer the current one."""
        return self._call("patch", kind, name, body=patch, name=name, content_type="application/merge-patch+json")

    def apply(self, body: Object, is_trial: bool = False) -> Object:
        """Apply on the server, which keeps fields that others own. A trial returns the result and changes nothing."""
        options = {"field_manager": FIELD_MANAGER, "force_conflicts": True} | ({"dry_run": "All"} if is_trial else {})
        name = body["metadata"]["name"]
        return self._call("server_side_apply", body["kind"], name, body["apiVersion"], body=body, **options)

    def delete(
        self, kind: str, name: str, uid: str | None = None, grace_seconds: int | None = None, version: str | None = None
    ) -> None:
        """Delete an object and what it owns. An absent object is no error, nor, with `uid`, one of another uid.

        With a grace of 0 s a pod's object is deleted at once, even if its node does not answer. `version` is the
        apiVersion of a kind that `API_VERSIONS` does not name.
        """
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            self._call("delete", kind, name, version, name=name, body=body)
        except _Absent:
            return
        except Conflict:
            if not uid:
                raise

    def log(self, pod: str, container: str) -> Iterator[str]:
        """Yield the log lines of a pod, each after its time stamp, until the stream ends."""
        core = kubernetes.client.CoreV1Api(self._client)
        with _explained(f"read the log of pod {pod}"):
            yield from kubernetes.watch.Watch().stream(
                core.read_namespaced_pod_log,
                pod,
                self.namespace,
                container=container,
                timestamps=True,
                _request_timeout=(CONNECT_SECONDS, SILENCE_SECONDS),
            )

    def execute(self, pod: str, container: str, command: list[str]) -> str:
        """Run a command in a pod's container and return its stdout and stderr."""
        core = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(self._client.configuration))
        with _explained(f"execute a command in pod {pod}"):
            return str(
                kubernetes.stream.stream(
                    core.connect_get_namespaced_pod_exec,
                    pod,
                    self.namespace,
                    container=container,
                    command=command,
                    stdout=True,
                    stderr=True,
                    _request_timeout=SILENCE_SECONDS,
                )
            )

    def _call(self, verb: str, kind: str, what: str = "", api_version: str | None = None, **options: Any) -> Object:
        """Call the API for a kind, in the namespace where the kind has one. `what` names the object in errors."""
        with _explained(f"{verb.replace('_', ' ')} {kind} {what}".rstrip()):
            resource = self._resource(kind, api_version or API_VERSIONS[kind])
            scope = {"namespace": self.namespace} if resource.namespaced else {}
            return dict(getattr(resource, verb)(**options, **scope).to_dict())

    def _resource(self, kind: str, version: str) -> Any:
        try:
            return self._dynamic.resources.get(api_version=version, kind=kind)
        except ResourceNotFoundError as error:
            raise KindAbsent(
                f"the cluster at {self.server} has no type {kind} ({version}): "
                f"install its operator first; k8s/README.md lists the requirements of a cluster."
            ) from error


def connect() -> Api:
    """Connect to the cluster of this pod, of KUBECONFIG, of `make cluster-local`, or of ~/.kube/config, in this order.

    Raises `DeviceError` when no cluster is configured or it does not answer.
    """
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            kubernetes.config.load_incluster_config()
            return Api(_patient(kubernetes.client.ApiClient()))
        file = os.environ.get("KUBECONFIG") or (str(LOCAL_KUBECONFIG) if LOCAL_KUBECONFIG.exists() else None)
        return Api(_patient(kubernetes.config.new_client_from_config(config_file=file)))
    except (ConfigException, OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise DeviceError(
            f"no Kubernetes cluster is configured ({error}). Set KUBECONFIG; on EKS `aws eks "
            f"update-kubeconfig --region REGION --name NAME`; or start one here: make cluster-local"
        ) from error


def _patient(client: kubernetes.client.ApiClient) -> kubernetes.client.ApiClient:
    """Set a time limit on every call, discovery included, so that a network that drops packets ends in an error."""
    pool = client.rest_client.pool_manager.connection_pool_kw
    pool["timeout"] = urllib3.Timeout(connect=CONNECT_SECONDS, read=TIMEOUT_SECONDS)
    pool["retries"] = urllib3.Retry(1, backoff_factor=0.5)
    return client


class _Absent(DeviceError):
    pass


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the errors of the Kubernetes client into errors that say what was asked for."""
    try:
        yield
    except ApiException as error:
        raise _explain(what, error) from error
    except urllib3.exceptions.HTTPError as error:
        raise ApiUnreachable(f"{what}: the Kubernetes API does not answer: {error}") from error


def _explain(what: str, error: ApiException) -> DeviceError:
    said = _message(error)
    if error.status == 404:
        return _Absent(f"{what}: not found. {said}")
    if error.status == 409:
        return Conflict(f"{what}: {said}")
    if error.status in (429, 500, 502, 503, 504):
        return ApiUnreachable(f"{what}: {said}")
    if error.status in (401, 403):
        return DeviceError(f"{what}: the cluster refuses the request: {said}. {ASK_FOR_RIGHTS}")
    return DeviceError(f"{what}: {said}")


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def conditions_of(thing: Object) -> list[Object]:
    return (thing.get("status") or {}).get("conditions") or []


def has_condition(thing: Object, *types: str) -> bool:
    """Whether a condition of one of these types is True."""
    return any(each["type"] in types and each["status"] == "True" for each in conditions_of(thing))


def is_pod_over(pod: Object) -> bool:
    """Whether a pod's containers have ended, or will never start."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_job_over(job: Object) -> bool:
    """Whether a Job of Kubernetes has ended, well or badly."""
    return has_condition(job, "Complete", "Failed")
