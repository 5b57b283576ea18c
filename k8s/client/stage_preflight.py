"""Checks with the Kubernetes API whether a stage could run, before the client creates anything.

What only a pod can see, an init container of the deploy Job checks (`k8s.objects.deploy_job`).
"""

from __future__ import annotations

from collections.abc import Iterable

from deploy.client.instance_type import check_instance_type
from deploy.client.outline import Outline
from deploy.reservation import explain_end
from k8s.client.compile_tasks import check_trace
from k8s.objects.api import Api
from k8s.objects.capacity import check_nodes, check_queue, check_size
from k8s.objects.deployment import Deployment
from k8s.objects.names import NEURON
from k8s.objects.placement import explain_batch_scheduler, heads_of, is_ready
from k8s.objects.record import read_running_record
from k8s.objects.worker_group import WorkerGroup, image_of

CHANGE_SHAPE = "TRAINIUM_SHAPE in the overlay's settings.env, then: make cluster-up"


def check_cluster(api: Api, group: WorkerGroup, deployment: Deployment, outline: Outline) -> list[str]:
    """Problems that the Kubernetes API shows. Raises `DeviceError` for what this user has no right to read."""
    problems = [
        _check_head(api, group),
        explain_batch_scheduler(api, group.head_pod),
        check_trace(group, outline),
        check_instance_type(group.name, outline, group.instance_type, CHANGE_SHAPE),
        check_size(group, deployment.nodes),
        check_queue(api, group, deployment.nodes),
        *_check_claims(api, group),
        # The nodes of a pool are added for the deployment; the deploy Job checks the pool before that.
        explain_end(group.capacity_ends_at) if group.node_pool else check_nodes(api, group, deployment.nodes),
        _check_other_stages(api, group),
    ]
    return list(filter(None, problems))


def _check_head(api: Api, group: WorkerGroup) -> str:
    heads = heads_of(api)
    wanted = image_of(group.head_pod)
    for pod in filter(is_ready, heads):
        runs = image_of(pod["spec"])
        if runs == wanted:
            return ""
        return (
            f"the Ray head still runs {runs}, but the cluster specifies {wanted}: when no stage runs, "
            f"kubectl -n {api.namespace} delete pod {pod['metadata']['name']}"
        )
    state = heads[0]["status"].get("phase", "unknown") if heads else "absent"
    return f"the Ray head is not ready ({state}): kubectl -n {api.namespace} describe pods -l ray.io/node-type=head"


def _check_claims(api: Api, group: WorkerGroup) -> Iterable[str]:
    """Claims of the stage's pods without a volume, which would keep added nodes waiting."""
    for volume in group.pod["volumes"]:
        if "persistentVolumeClaim" not in volume:
            continue
        name = volume["persistentVolumeClaim"]["claimName"]
        found = api.find("PersistentVolumeClaim", name)
        if found is None:
            yield f"PersistentVolumeClaim {name} does not exist: make cluster-up"
        elif found["status"].get("phase") != "Bound":
            yield (
                f"claim {name} is {found['status'].get('phase')}, not Bound: its volume "
                f"{found['spec'].get('volumeName', 'any')} does not exist, is bound to another claim, or is smaller"
            )


def _check_other_stages(api: Api, worker_group: WorkerGroup) -> str:
    """The reason why the stage must wait for another one that holds Trainium nodes; empty where none does."""
    if NEURON not in worker_group.requests:
        return ""
    for group in worker_group.cluster["spec"]["workerGroupSpecs"]:
        name = group["groupName"]
        requests = group["template"]["spec"]["containers"][0].get("resources", {}).get("requests", {})
        if name == worker_group.name or NEURON not in requests:
            continue
        record = read_running_record(api, name)
        if record or group.get("replicas"):
            by = f"deployed by {record.deployment.user}" if record else "kept (KEEP=1)"
            return (
                f"stage {name} is {by} and holds Trainium nodes: wait for it (make stage-status), or make stop-stage "
                f"STAGE={name}"
            )
    return ""
