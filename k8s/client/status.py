"""Describes a cluster: its deployed stages, their progress, and how the last deployment of every stage ended."""

from __future__ import annotations

from k8s.client.kuberay_one_off import describe_one_offs
from k8s.client.node_pool_view import describe_pool
from k8s.objects.api import Api
from k8s.objects.attempt import nodes_of, placed_size
from k8s.objects.deployment import UnknownRecord
from k8s.objects.names import DEPLOYMENT_LABEL
from k8s.objects.placement import explain_placement, explain_start, heads_of, is_ready, pods_of
from k8s.objects.record import Record, read_record
from k8s.objects.worker_group import WorkerGroup, read_cluster, worker_group_of
from services.common.recipe.schema import STAGES


def describe_status(api: Api) -> str:
    """The status for a person: a paragraph for every stage, and one for running subcommands."""
    cluster = read_cluster(api)
    heads = heads_of(api)
    head = "ready" if any(map(is_ready, heads)) else "not ready"
    paragraphs = [f"cluster     {api.server}, namespace {api.namespace}, Ray head {head}"]
    groups = [worker_group_of(cluster, name) for name in STAGES]
    paragraphs += [_describe_stage(api, group) for group in groups]
    if one_offs := describe_one_offs(api):
        paragraphs.append("\n".join(["one-offs", *one_offs]))
    return "\n\n".join(paragraphs)


def _describe_stage(api: Api, group: WorkerGroup) -> str:
    try:
        record = read_record(api, group.name)
    except UnknownRecord as error:
        return f"{group.name}\n  deployed  {error}"
    pods = pods_of(api, group.name)
    lines = [
        f"{group.name}",
        f"  image     {group.image}",
        f"  pods      {sum(map(is_ready, pods))} ready, {len(pods)} created, {group.replicas} wanted",
    ]
    if group.node_pool:
        lines.append(f"  nodes     {describe_pool(api, group.node_pool)}")
    if record:
        lines += _describe_record(api, group, record)
    accepted = record.accepted if record else None
    is_kept = bool(accepted and accepted.keep)
    if pods and not is_kept and (record is None or record.is_over):
        lines.append(f"  orphaned  {len(pods)} pods belong to no deployment: make stop-stage STAGE={group.name}")
    if pods and is_kept and record and record.is_over:
        lines.append(f"  kept      {len(pods)} pods hold their nodes (KEEP=1): make stop-stage STAGE={group.name}")
    if group.good_images:
        lines.append(f"  good      {group.good_images[-1]}")
    return "\n".join(lines)


def _describe_record(api: Api, group: WorkerGroup, record: Record) -> list[str]:
    deployment = record.deployment
    lines = [
        f"  deployed  by {deployment.user} at {record.created_at}, {deployment.nodes} nodes, {deployment.mode} cluster"
    ]
    lines += [
        f"  attempt   {number} ended with exit code {attempt.exit_code}"
        f"{' and a newer checkpoint' if attempt.progressed and attempt.exit_code else ''}: {attempt.message}"
        for number, attempt in enumerate(record.attempts, start=1)
    ]
    if record.outcome:
        lines.append(f"  outcome   exit code {record.outcome.exit_code}: {record.outcome.message}")
    elif not record.is_over and not record.acceptance:
        lines.append("  now       its image is asked whether it accepts the deployment")
    elif not record.is_over:
        number = len(record.attempts) + 1
        job = api.find("RayJob", deployment.rayjob_name(number))
        state = (job.get("status") or {}).get("jobStatus") or "not submitted yet" if job else "pods are being placed"
        pod_group = api.find("PodGroup", group.pod_group)
        nodes = nodes_of(job) if job else placed_size(pod_group, deployment, number)
        on = f" on {nodes} of {deployment.nodes} nodes" if nodes < deployment.nodes else ""
        stopping = f", stopping for {record.stop}" if record.stop else ""
        lines.append(f"  now       attempt {number}{on}: {state.lower()}{stopping}")
        missing = explain_placement(api, group, nodes) if deployment.mode == "shared" else ""
        lines += [f"  waits     {missing}"] if missing else []
    if not record.acceptance and record.before:
        lines.append(f"  before    by {record.before.user}: {record.before.image}")
    if not record.is_over:
        pods = api.find_all("Pod", f"{DEPLOYMENT_LABEL}={deployment.id}")
        pending = [explain_start(api, pod) for pod in pods if pod["status"].get("phase") == "Pending"]
        lines += [f"  job       its pod has not started: {waits}" for waits in pending]
    return lines
