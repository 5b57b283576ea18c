"""The probe of network policies: pods that may not reach the Kubernetes API try to, and have to fail.

A cluster takes policies whether or not anything enforces them, and an engine may know pods of Deployments alone. So it
is tried from a pod of a Job and from one of the RayCluster, whose kinds run everything here. The Kubernetes API is what
both could reach: it answers the client at this moment, and no policy lets them.
"""

from __future__ import annotations

from k8s.client.setup_job import run_setup_job
from k8s.objects.api import Api, Object
from k8s.objects.names import COMPONENT_LABEL, NAMESPACE, STAGE_LABEL
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError
from services.common.recipe.schema import STAGES

POLICIES_ANNOTATION = "millrace.dev/network-policies"  # of the namespace
NOT_ENFORCED = "not-enforced"
"""An overlay's word that its cluster has no engine for network policies."""
NAME = "preflight-network"
KEPT_SECONDS = 300
LONGEST_SECONDS = 300
CLOSED, OPEN = "closed", "open"
PATIENCE_SECONDS = 60
"""Seconds in which an engine has to know a new pod, which it may let through until then."""
SCRIPT = f"""
import os, socket, sys, time
address = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
end, failures = time.monotonic() + float(sys.argv[1]), 0
while failures < 2 and (failures or time.monotonic() < end):
    try:
        socket.create_connection(address, timeout=3).close()
        failures = 0
    except OSError:
        failures += 1
    time.sleep(1)
print("{CLOSED}" if failures == 2 else "{OPEN}")
"""


def require_network_policies(api: Api, namespace: Object, cluster: Object, head: Object) -> str:
    """What was found, in a sentence. Raises `DeviceError` where pods get through and the overlay does not say so."""
    is_expected = (namespace["metadata"].get("annotations") or {}).get(POLICIES_ANNOTATION) != NOT_ENFORCED
    command = ["python", "-c", SCRIPT, str(PATIENCE_SECONDS if is_expected else 1)]
    said = {
        "a Job": run_setup_job(api, _job(cluster, command)),
        "the RayCluster": api.execute(head["metadata"]["name"], head["spec"]["containers"][0]["name"], command),
    }
    if odd := {owner: words for owner, words in said.items() if words.strip() not in (CLOSED, OPEN)}:
        raise DeviceError(f"the probe of network policies did not answer: {odd}")
    reached = [owner for owner, words in said.items() if words.strip() == OPEN]
    if not reached:
        return "network policies keep pods of Jobs and of the RayCluster from what they may not reach"
    found = (
        f"pods of {' and of '.join(reached)} reach the Kubernetes API, which network policies forbid: nothing enforces "
        f"them for these pods"
    )
    if not is_expected:
        return f"{found}, as the overlay says"
    raise DeviceError(
        f"{found}. Install or switch on an engine (on EKS the VPC CNI's enableNetworkPolicy), then run this again. "
        f"An overlay for a cluster without one annotates the namespace with {POLICIES_ANNOTATION}: {NOT_ENFORCED}"
    )


def _job(cluster: Object, command: list[str]) -> Object:
    """A pod with a stage's account, as the short pods of preflight have it, from the head's image."""
    group = WorkerGroup(STAGES[0], cluster, 0)
    head = group.head_pod
    labels: Object = {STAGE_LABEL: STAGES[0], COMPONENT_LABEL: "preflight"}
    pod: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": STAGES[0],
        "automountServiceAccountToken": False,
        "securityContext": head["securityContext"],
        **{key: head[key] for key in ("nodeSelector", "tolerations", "imagePullSecrets") if key in head},
        "containers": [
            {
                "name": "try",
                "image": head["containers"][0]["image"],
                "imagePullPolicy": head["containers"][0]["imagePullPolicy"],
                "command": command,
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
                "securityContext": head["containers"][0]["securityContext"],
            }
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": LONGEST_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
