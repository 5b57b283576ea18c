"""Checks that the cluster enforces network policies: pods that policies keep from the Kubernetes API try to reach it.

A cluster accepts policies whether or not an engine enforces them, and an engine may enforce them only for pods of
Deployments. So a pod of a Job and a pod of the RayCluster try, the two kinds that run everything here. The Kubernetes
API is a good address to try: it answers the client at this moment, and no policy allows these pods to reach it.
"""

from __future__ import annotations

from k8s.client.setup_job import run_setup_job
from k8s.objects.api import Api, Object
from k8s.objects.deploy_job import render_short_job
from k8s.objects.names import COMPONENT_LABEL, STAGE_LABEL
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError
from services.common.recipe.schema import STAGES

POLICIES_ANNOTATION = "millrace.dev/network-policies"
"""Annotation of the namespace."""
NOT_ENFORCED = "not-enforced"
"""The annotation's value on a cluster that has no engine for network policies."""
LONGEST_SECONDS = 300
CLOSED, OPEN = "closed", "open"
PATIENCE_SECONDS = 60
"""Seconds after which an engine must enforce policies for a new pod."""
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
    """Describe the result. Raises `DeviceError` for policies that are not enforced, unless an annotation says so."""
    is_expected = (namespace["metadata"].get("annotations") or {}).get(POLICIES_ANNOTATION) != NOT_ENFORCED
    command = ["python", "-c", SCRIPT, str(PATIENCE_SECONDS if is_expected else 1)]
    group = WorkerGroup(STAGES[0], cluster, 0)
    job = render_network_job(group, command)
    answers = {
        "a Job": run_setup_job(api, job),
        "the RayCluster": api.execute(head["metadata"]["name"], head["spec"]["containers"][0]["name"], command),
    }
    if odd := {owner: words for owner, words in answers.items() if words.strip() not in (CLOSED, OPEN)}:
        said = "; ".join(f"{owner}: {words.strip() or 'nothing'}" for owner, words in odd.items())
        raise DeviceError(f"the pods that test network policies gave no answer ({said}): repeat make cluster-up")
    reached = [owner for owner, words in answers.items() if words.strip() == OPEN]
    if not reached:
        return "network policies are enforced for pods of Jobs and of the RayCluster"
    found = (
        f"pods of {' and of '.join(reached)} reach the Kubernetes API, which network policies forbid: the policies are "
        f"not enforced for these pods"
    )
    if not is_expected:
        return f"{found}, as the overlay's annotation says"
    raise DeviceError(
        f"{found}. Install or enable an engine (on EKS the VPC CNI's enableNetworkPolicy), then repeat the command. "
        f"For a cluster without an engine, annotate the overlay's namespace with {POLICIES_ANNOTATION}: {NOT_ENFORCED}"
    )


def render_network_job(group: WorkerGroup, command: list[str]) -> Object:
    """A Job that runs the command in the head's image, beside the head."""
    head = group.head_pod
    container = {name: head["containers"][0][name] for name in ("image", "imagePullPolicy", "securityContext")}
    container |= {
        "name": "look",
        "command": command,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
    }
    placement = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "securityContext")
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": group.pod["serviceAccountName"],
        "automountServiceAccountToken": False,
        **{name: head[name] for name in placement if name in head},
        "containers": [container],
    }
    labels = {STAGE_LABEL: group.name, COMPONENT_LABEL: "preflight"}
    return render_short_job("preflight-network", labels, pod, limit_seconds=LONGEST_SECONDS)
