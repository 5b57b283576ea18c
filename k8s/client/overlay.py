"""Creates a cluster from an overlay: renders and applies its objects and waits for the head; or deletes them all."""

from __future__ import annotations

import copy
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import yaml

from deploy.progress import ProgressPrinter
from deploy.stage_contract import DRAIN_VARIABLES, RECIPE
from k8s.client.generated_component import PLACEHOLDER, write_component
from k8s.client.network_probe import require_network_policies
from k8s.client.node_pool_view import print_left_nodes, require_nodes_given_back
from k8s.client.setup_job import run_setup_job
from k8s.client.stage_image import choose_image
from k8s.objects.api import Api, Conflict, KindAbsent, Object
from k8s.objects.names import CLUSTER, COMPONENT_LABEL, ONE_OFF_NODES, RUN_LABEL, VARIANT_ANNOTATION
from k8s.objects.placement import explain_batch_scheduler, explain_start, heads_of, is_ready, newest_event, pods_of
from k8s.objects.record import read_running_record
from k8s.objects.worker_group import WorkerGroup, head_pod_of, image_of, read_cluster, worker_group_of
from services.common.errors import DeviceError, RecipeError, TryAgain
from services.common.recipe.schema import STAGES

OVERLAYS = Path(__file__).parents[1] / "overlays"
LOCAL_KUBECTL = Path(__file__).parents[2] / ".cluster/bin/kubectl"
POLL_SECONDS = 1.0
HEAD_SECONDS = 900.0
DOWN_SECONDS = 600.0
APPLY_ATTEMPTS = 10
OURS = "app.kubernetes.io/part-of=millrace"
"""The label of an overlay's namespaces."""
DOWN_FIRST = ("Job", "CronJob", "RayJob", "RayCluster")
"""Kinds that are deleted first, since they need the operator or hold a volume."""


def render(overlay: Path) -> list[Object]:
    """The overlay's objects as kustomize renders them, once its component of settings is written.

    Raises `DeviceError` with kustomize's message where it fails, and `RecipeError` for wrong settings.
    """
    if not (overlay / "kustomization.yaml").is_file():
        known = ", ".join(sorted(each.name for each in OVERLAYS.iterdir() if each.is_dir()))
        raise RecipeError(f"OVERLAY={overlay} has no kustomization.yaml: expected {known}, or a folder of your own")
    write_component(overlay)
    done = subprocess.run([find_kubectl(), "kustomize", overlay], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"{overlay} cannot be rendered: {done.stderr.strip()}")
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def render_filled_in(overlay: Path) -> list[Object]:
    """The overlay's objects. Raises `RecipeError` for a placeholder among them."""
    objects = render(overlay)
    left = sorted({f"{each['kind']} {each['metadata']['name']}" for each in objects if PLACEHOLDER in yaml.dump(each)})
    if left:
        raise RecipeError(
            f"{overlay}: {PLACEHOLDER} is still in {', '.join(left)}: write your own values into its settings.env, as "
            f"make infra-up does, or into the overlay's other files"
        )
    return objects


def find_kubectl() -> Path:
    """The kubectl of PATH, or else the one that `make cluster-local` compiled; it is used for its kustomize.

    Raises `DeviceError` where there is neither.
    """
    on_path = shutil.which("kubectl")
    if on_path or LOCAL_KUBECTL.exists():
        return Path(on_path) if on_path else LOCAL_KUBECTL
    raise DeviceError(
        f"the manifests need kubectl 1.27 or newer, on PATH or in {LOCAL_KUBECTL.parent}: install it, or compile it "
        f"with `.venv/bin/python -m tests.cluster.kit build`"
    )


def cluster_up(api: Api, overlay: Path, head_tag: str) -> int:
    """Apply the overlay and wait for the head. Images and replicas that deployments set are kept.

    Raises `DeviceError` where it would change the head while a stage runs, where there is no operator, and for one with
    a batch scheduler.
    """
    objects = render_filled_in(overlay)
    cluster, namespace = _find(objects, "RayCluster", CLUSTER), _find(objects, "Namespace", api.namespace)
    _set_head_image(api, objects, head_tag)
    if live := api.find("RayCluster", CLUSTER):
        _require_head_untouched(api, _merged(cluster, live), live)
    for each in _in_order(objects):
        place = api.within(each["metadata"].get("namespace", api.namespace))
        what = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Job":
            print(f"ran         {what}: {run_setup_job(place, each)}", flush=True)
            continue
        if each is cluster:
            _apply_cluster(api, each)
        else:
            place.apply(each)
        print(f"applied     {what}", flush=True)
    head, image = _await_head(api)
    print(f"checked     {require_network_policies(api, namespace, read_cluster(api), head)}", flush=True)
    if image_of(head["spec"]) != image:
        print(
            f"the head still runs {image_of(head['spec'])}; for {image} delete its pod when no stage runs: "
            f"kubectl -n {api.namespace} delete pod -l ray.io/node-type=head"
        )
    print(f"RayCluster {CLUSTER} is up at {api.server}: make deploy-stage STAGE=tokenizer")
    return 0


def write_overlay(file: TextIO, find_api: Callable[[], Api], overlay: Path, head_tag: str) -> int:
    """Write the objects that `cluster_up` applies to a cluster without deployments.

    Without `head_tag` the head's image stays unset. Raises `RecipeError` for settings that are not filled in.
    """
    objects = render_filled_in(overlay)
    if head_tag:
        _set_head_image(find_api(), objects, head_tag)
    yaml.safe_dump_all(_in_order(objects), file, explicit_start=True, sort_keys=False, allow_unicode=True, width=120)
    file.flush()
    return 0


def cluster_down(api: Api, overlay: Path, is_forced: bool) -> int:
    """Delete the overlay's objects, but no data of volumes. Raises `DeviceError` while a stage is deployed."""
    objects = render(overlay)
    running = [] if is_forced else [stage for stage in STAGES if read_running_record(api, stage)]
    if running:
        raise DeviceError(
            f"{', '.join(running)} is deployed: make stop-stage STAGE={running[0]} first, or make cluster-down "
            f"FORCE=1, which loses the steps since the newest checkpoint"
        )
    if not is_forced:
        require_nodes_given_back(api)
    for kind in DOWN_FIRST:
        for each in api.find_all(kind):
            api.delete(kind, each["metadata"]["name"])
        _await_gone(api, kind)
        # A deploy Job ends its stage, and a one-off's Job releases its node, when it is deleted. Both need their rights
        # and the RayCluster for that.
        _await_gone(api, "Pod", f"{COMPONENT_LABEL} in (deploy,{ONE_OFF_NODES})")
    print_left_nodes(api)
    for each in reversed(_in_order(objects)):
        kind, name = each["kind"], each["metadata"]["name"]
        with suppress(KindAbsent):
            place = api.within(each["metadata"].get("namespace", api.namespace))
            place.delete(kind, name, version=each["apiVersion"])
        print(f"deleted     {kind} {name}", flush=True)
    _await_gone(api, "Namespace", OURS)
    print("the cluster's objects are deleted; the artifacts are kept")
    return 0


def choose_overlay(name: str) -> Path:
    """The overlay of a name in k8s/overlays, or of any folder."""
    known = OVERLAYS / name
    return known if known.is_dir() else Path(name)


def _find(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def _set_head_image(api: Api, objects: list[Object], head_tag: str) -> None:
    """Set the image of the head, of the reaper and of the Jobs that prepare the cluster."""
    cluster = _find(objects, "RayCluster", CLUSTER)
    head = head_pod_of(cluster)["containers"][0]
    image = choose_image(api, "head", cluster["metadata"]["annotations"][VARIANT_ANNOTATION], head, head_tag)
    templates = [cluster["spec"]["headGroupSpec"]["template"]]
    templates += [each["spec"]["jobTemplate"]["spec"]["template"] for each in objects if each["kind"] == "CronJob"]
    templates += [each["spec"]["template"] for each in objects if each["kind"] == "Job"]
    unset = head["image"]
    for container in [each for template in templates for each in template["spec"]["containers"]]:
        if container["image"] == unset:
            container["image"] = image


def _apply_cluster(api: Api, rendered: Object) -> None:
    """Apply the RayCluster with the live one's deployments, again if somebody changes it in between."""
    for _ in range(APPLY_ATTEMPTS):
        live = api.find("RayCluster", CLUSTER)
        merged = _merged(rendered, live)
        try:
            if live:
                _require_head_untouched(api, merged, live)
            api.apply(merged)
            return
        except Conflict:
            time.sleep(POLL_SECONDS)
    raise TryAgain(f"RayCluster {CLUSTER} changed during {APPLY_ATTEMPTS} attempts to apply it: repeat the command")


def _merged(rendered: Object, live: Object | None) -> Object:
    """The rendered RayCluster with the replicas, images, recipes and drains that deployments set in the live one."""
    if live is None:
        return rendered
    cluster = copy.deepcopy(rendered)
    cluster["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
    was_there = {group["groupName"] for group in live["spec"].get("workerGroupSpecs") or []}
    for group in cluster["spec"]["workerGroupSpecs"]:
        if group["groupName"] in was_there:
            _keep_deployment(group, worker_group_of(live, group["groupName"]))
    return cluster


def _keep_deployment(group: Object, was: WorkerGroup) -> None:
    pod = group["template"]["spec"]
    container = pod["containers"][0]
    group["replicas"] = was.replicas
    if was.has_image:
        container["image"] = was.image
    pod["volumes"] = [was.pod["volumes"][was.recipe_index] if v["name"] == RECIPE.name else v for v in pod["volumes"]]
    if run := (was.spec["template"].get("metadata", {}).get("labels") or {}).get(RUN_LABEL):
        group["template"].setdefault("metadata", {}).setdefault("labels", {})[RUN_LABEL] = run
    if was.replicas:  # the grace period of a group without pods is the manifests'
        pod["terminationGracePeriodSeconds"] = was.pod["terminationGracePeriodSeconds"]
        drains = {v["name"]: v for v in was.container["env"] if v["name"] in DRAIN_VARIABLES}
        container["env"] = [drains.get(variable["name"], variable) for variable in container["env"]]


def _require_head_untouched(api: Api, wanted: Object, live: Object) -> None:
    """Raise `DeviceError` for a changed head while a stage is deployed.

    A trial apply gives the changes with the API server's defaults. The operator replaces no pod for a change, but a
    head that is lost comes back changed, perhaps with another Ray, which no worker can join. The admission policy
    `millrace-deployments` refuses, in the trial already, changed pods of a worker group that runs.
    """
    would_be = api.apply(wanted, is_trial=True)
    before, after = ({k: v for k, v in each["spec"].items() if k != "workerGroupSpecs"} for each in (live, would_be))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    busy = [stage for stage in STAGES if read_running_record(api, stage) or pods_of(api, stage)] if changed else []
    if busy:
        present = image_of(head_pod_of(live))
        raise DeviceError(
            f"stage {' and '.join(busy)} is deployed or has pods, and this would change its head "
            f"({', '.join(changed)}; image {present} -> {image_of(head_pod_of(would_be))}). Wait for it, or make "
            f"stop-stage STAGE={busy[0]}, then repeat the command. HEAD_TAG={present} keeps the head's image. Nothing "
            f"was applied to the RayCluster."
        )


def _await_head(api: Api) -> tuple[Object, str]:
    """Wait for the head: its ready pod, and the image that a new head would run."""
    wanted = head_pod_of(read_cluster(api))
    image = image_of(wanted)
    began = time.monotonic()
    progress = ProgressPrinter("the Ray head is not ready")
    while True:
        heads = heads_of(api)
        if why := explain_batch_scheduler(api, wanted):
            raise DeviceError(why)
        if ready := [head for head in heads if is_ready(head)]:
            return ready[0], image
        if heads and image_of(heads[0]["spec"]) != image and _never_ran(heads[0]):
            # The operator does not replace a pod whose template changed.
            api.delete("Pod", heads[0]["metadata"]["name"], uid=heads[0]["metadata"]["uid"])
        if heads:
            state = explain_start(api, heads[0])
        else:
            state = newest_event(api, read_cluster(api)) or "waiting for the KubeRay operator to create its pod"
        progress.report(state)
        if time.monotonic() - began > HEAD_SECONDS:
            raise TryAgain(f"the Ray head was not ready after {HEAD_SECONDS:.0f} s: {state}")
        time.sleep(POLL_SECONDS)


def _never_ran(pod: Object) -> bool:
    """Whether no container of the pod has run yet, so that nothing is lost with the pod."""
    containers = pod["status"].get("containerStatuses") or []
    return all("waiting" in each["state"] and not each.get("restartCount") for each in containers)


def _await_gone(api: Api, kind: str, selector: str = "") -> None:
    deadline = time.monotonic() + DOWN_SECONDS
    while left := api.find_all(kind, selector):
        if time.monotonic() > deadline:
            names = ", ".join(each["metadata"]["name"] for each in left)
            raise TryAgain(
                f"{kind} {names} is not deleted after {DOWN_SECONDS:.0f} s: kubectl get {kind} -A -o yaml says what it "
                f"waits for. A RayCluster needs the KubeRay operator to be deleted"
            )
        time.sleep(POLL_SECONDS)


def _in_order(objects: list[Object]) -> list[Object]:
    """The objects in kustomize's order, with Jobs after the network policies, and the RayCluster after everything."""
    return sorted(objects, key=lambda each: {"Job": 1, "RayCluster": 2}.get(each["kind"], 0))
