"""Names the metrics that rules and dashboards may read, and reads the names in their queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from services.common.process.stage_metrics import FILE_SYSTEM_METRICS, PREFIX, PROGRESS_METRICS
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "k8s/monitoring/rules.yaml"
DASHBOARDS = sorted((REPOSITORY / "k8s/dashboards").glob("*.json"))

OWN = {
    *(PREFIX + metric.name for metric in (*METRICS, *RUN_METRICS)),
    *(PREFIX + name for name in (*PROGRESS_METRICS, *FILE_SYSTEM_METRICS)),
}
EXTERNAL = {
    # Prometheus itself: https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/
    "ALERTS",
    # kube-state-metrics: docs/metrics/{cluster,workload} of github.com/kubernetes/kube-state-metrics
    "kube_job_status_failed",
    "kube_namespace_created",
    "kube_node_info",
    "kube_node_status_allocatable",
    "kube_pod_container_resource_requests",
    "kube_pod_container_status_restarts_total",
    "kube_pod_status_phase",
    "kube_pod_status_ready",
    # node-exporter: https://github.com/prometheus/node_exporter, collector filesystem
    "node_filesystem_avail_bytes",
    "node_filesystem_size_bytes",
    # Ray: https://docs.ray.io/en/latest/ray-observability/reference/system-metrics.html, and the gauges of
    # ray/dashboard/modules/reporter/reporter_agent.py, to which Ray's agent puts `ray_`
    "ray_cluster_active_nodes",
    "ray_node_cpu_utilization",
    "ray_node_mem_total",
    "ray_node_mem_used",
    "ray_node_network_receive_speed",
    "ray_node_network_send_speed",
    "ray_tasks",
    # KubeRay from 1.4: https://docs.ray.io/en/latest/cluster/kubernetes/k8s-ecosystem/metrics-references.html
    "kuberay_job_deployment_status",
    # Volcano 1.14: pkg/scheduler/metrics/{metrics,queue}.go of github.com/volcano-sh/volcano
    "volcano_queue_allocated_milli_cpu",
    "volcano_queue_capacity_milli_cpu",
    "volcano_queue_request_milli_cpu",
    "volcano_unschedule_job_count",
    # Neuron Monitor: neuron-monitor-user-guide of awsdocs-neuron.readthedocs-hosted.com
    "neuroncore_utilization_ratio",
}


def read_rules() -> list[dict[str, Any]]:
    """Return the rules of all groups."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def write_plain_rules(path: Path, **changes: Any) -> None:
    """Write the rules in Prometheus' own format, with `changes` made to each alert."""
    spec = yaml.safe_load(RULES.read_text(encoding="utf-8"))["spec"]
    for group in spec["groups"]:
        for rule in group["rules"]:
            rule.update(changes if "alert" in rule else {})
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")


def read_dashboard(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def queries_of(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the place and the PromQL of each query: panels, annotations and variables."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric = re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"]["query"])
            assert metric, variable
            yield f"variable {variable['name']}", metric[1]


def metrics_in(query: str) -> set[str]:
    """Return the names of the metrics in a PromQL query."""
    plain = re.sub(r'"[^"]*"', "", query)
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", plain)
    plain = re.sub(r"\b(by|without|on|ignoring|group_left|group_right) *\([^)]*\)", " ", plain)
    names = re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?! *\()(?![\w:])", plain)
    return set(names) - {"and", "or", "unless", "bool", "offset"}
