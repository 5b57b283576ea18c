"""The manifests as `kubectl apply -k` would send them, and short ways to what is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from images.platforms import REPOSITORY

OVERLAYS = {"local": REPOSITORY / "k8s/overlays/local", "eks": REPOSITORY / "k8s/overlays/eks"}

Thing = dict[str, Any]  # a Kubernetes object, or a part of one


def write_overlay(folder: Path, base: Path, **parts: Any) -> Path:
    """Write an overlay on another, with parts such as patches."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(base.resolve(), folder.resolve())],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(header | parts), encoding="utf-8")
    return folder


def copy_overlay(overlay: Path, folder: Path, **settings: str) -> Path:
    """A copy of an overlay with other settings, as people make one for a cluster of their own."""
    text = (overlay / "kustomization.yaml").read_text(encoding="utf-8")
    above = os.path.relpath(overlay.parents[1].resolve(), folder.resolve())
    (folder / "kustomization.yaml").write_text(text.replace("../..", above), encoding="utf-8")
    lines = (overlay / "settings.env").read_text(encoding="utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if not line.startswith("#")) | settings
    (folder / "settings.env").write_text("".join(f"{k}={v}\n" for k, v in values.items()), encoding="utf-8")
    return folder


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
