"""The manifests as `kubectl apply -k` would send them, and short ways to what is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from images.platforms import REPOSITORY

OVERLAYS = {"local": REPOSITORY / "k8s/overlays/local", "eks": REPOSITORY / "k8s/overlays/eks"}

Thing = dict[str, Any]  # a Kubernetes object, or a part of one


def write_overlay_on_eks(folder: Path, **settings: str) -> Path:
    """An overlay on top of eks with other settings, which win as those in its own file would."""
    generator = {
        "name": "overlay-settings",
        "behavior": "merge",
        "literals": [f"{key}={value}" for key, value in settings.items()],
        "options": {"disableNameSuffixHash": True},
    }
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(OVERLAYS["eks"].resolve(), folder.resolve())],
        "configMapGenerator": [generator],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


def name_of(thing: Thing) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


def of_kind(things: list[Thing], kind: str) -> dict[str, Thing]:
    """Objects of a kind by their names."""
    return {thing["metadata"]["name"]: thing for thing in things if thing["kind"] == kind}


def cluster_of(things: list[Thing]) -> Thing:
    [cluster] = of_kind(things, "RayCluster").values()
    return cluster


def groups_of(things: list[Thing]) -> dict[str, Thing]:
    return {group["groupName"]: group for group in cluster_of(things)["spec"]["workerGroupSpecs"]}


def pods_of(things: list[Thing]) -> dict[str, Thing]:
    """The pod templates of the head and the groups."""
    head = cluster_of(things)["spec"]["headGroupSpec"]["template"]
    return {"head": head} | {name: group["template"] for name, group in groups_of(things).items()}


def containers_of(pod: Thing) -> list[Thing]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def environment_of(container: Thing) -> dict[str, str]:
    """The variables of a container; for a secret, its name and key."""
    return {each["name"]: each.get("value") or _secret_of(each) for each in container.get("env", [])}


def _secret_of(variable: Thing) -> str:
    reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
    return f"secret {reference['name']}/{reference['key']}" if reference else ""


def labels_of(things: list[Thing]) -> dict[str, dict[str, str]]:
    """The labels with which KubeRay makes the pods of the head and the groups (labelPod in controllers/ray/common)."""
    cluster = cluster_of(things)["metadata"]["name"]
    return {
        name: {
            "ray.io/is-ray-node": "yes",
            "ray.io/cluster": cluster,
            "ray.io/node-type": "head" if name == "head" else "worker",
            "ray.io/group": "headgroup" if name == "head" else name,
            "app.kubernetes.io/name": "kuberay",
            "app.kubernetes.io/created-by": "kuberay-operator",
            **pod["metadata"].get("labels", {}),
        }
        for name, pod in pods_of(things).items()
    }
