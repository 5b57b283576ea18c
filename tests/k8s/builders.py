"""Small real objects for the tests of this folder: a deployment, nodes, and a clock that a test moves."""

from __future__ import annotations

from typing import Any

from deploy.client.outline import Outline
from deploy.client.requested_recipe import read_requested_recipe
from k8s.client.resolved_deployment import DEFAULT_RECIPE
from k8s.objects.deployment import Deployment
from k8s.objects.one_off_job import OneOff
from services.common.recipe.schema import Stage
from tests.k8s.rendered import Thing

DIGEST = "0" * 64
REGION = "us-west-2"
READY = {"type": "Ready", "status": "True"}


class Clock:
    """A monotonic clock, in seconds."""

    now = 1_000.0


def deployment_of(stage: str = "trainer", **changes: Any) -> Deployment:
    fields: dict[str, Any] = {
        "stage": stage,
        "id": "abc123",
        "image": f"millrace/{stage}@sha256:{DIGEST}",
        "nodes": 2,
        "mode": "shared",
        "recipe": "",
        "recipe_digest": DIGEST,
        "arguments": ("--train.max_steps=5", "--corpus=/fsx/a folder"),
        "retries": 3,
        "keep": False,
        "user": "someone",
        "start_timeout_seconds": 60,
        "loss_timeout_seconds": 21_600,
        "limit_seconds": 0,
        "drain_seconds": 60,
        "fewer_nodes": (),
        "workers_per_node": 1,
        "tensor_parallel_size": 1,
        "node_pool": "",
        "capacity_ends_at": "",
    }
    return Deployment(**fields | changes)


def outline_of(**overrides: str) -> Outline:
    """The outline of the smallest recipe, with overrides such as `{"train.max_steps": "5"}`."""
    return read_requested_recipe(DEFAULT_RECIPE).with_arguments(*(f"--{k}={v}" for k, v in overrides.items())).outline


def node(name: str, taints: list[Thing], conditions: list[Thing]) -> Thing:
    return {
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"taints": taints},
        "status": {"conditions": conditions},
    }


def pod(name: str, on: str = "", component: str = "trainer", phase: str = "Running", **metadata: Any) -> Thing:
    """A pod of a stage or a Job, on the node `on` if that is given."""
    labels = {"millrace.dev/component": component, "millrace.dev/stage": "trainer", "ray.io/node-type": "worker"}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels} | metadata,
        "spec": {"terminationGracePeriodSeconds": 330} | ({"nodeName": on} if on else {}),
        "status": {"phase": phase},
    }


def one_off_of(stage: Stage = "trainer", **changes: Any) -> OneOff:
    fields: dict[str, Any] = {
        "stage": stage,
        "id": "abc123",
        "digest": "0" * 16,
        "image": f"millrace/{stage}@sha256:{DIGEST}",
        "words": ("artifacts", "list", "a b"),
        "recipe": "packed",
        "seconds": 3_600,
        "user": "somebody",
    }
    return OneOff(**fields | changes)
