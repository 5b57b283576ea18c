"""Runs the probes of preflight: short pods that check what only a pod can see, an image's platform and the artifacts.

A probe runs one image, which reports about itself. The head's image runs beside the head. A stage's image runs where
the stage's pods will run, since it must be pulled there anyway; an image that was loaded onto the nodes, or a stage
whose nodes are added for the deployment, runs beside the head as well.
"""

from __future__ import annotations

import json
import secrets
import shlex
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from deploy.exit_codes import EXIT_AGAIN, find_error_line
from deploy.progress import ProgressPrinter
from deploy.stage_contract import RECIPE
from k8s.client.pull_watch import OTHER_PROCESSOR, PullWatch, explain_wait
from k8s.objects.api import Api, ApiUnreachable, Object
from k8s.objects.deploy_job import aws_variables, render_short_job
from k8s.objects.names import COMPONENT_LABEL, DEPLOYER, STAGE_LABEL
from k8s.objects.worker_group import WorkerGroup, image_of
from services.common.errors import ArtifactError, DeviceError, RecipeError, StorageError

POLL_SECONDS = 0.5
LEAST_SECONDS = 600.0
"""Shortest time limit of a probe, whose image may have to be pulled first."""
LEFTOVER_SECONDS = 300
"""Seconds after which Kubernetes deletes an ended probe whose client was killed."""
CONTAINER = "look"
POOL_PROBE = "preflight-pool"
"""Component label of a probe that calls EKS, which a network policy allows."""
PLACEMENT_FIELDS = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets")
STAGE_CODES = (RecipeError.exit_code, ArtifactError.exit_code, StorageError.exit_code)


@dataclass(frozen=True)
class Answer:
    """The answer of an image, or the reason why there is none."""

    platform: dict[str, str] = field(default_factory=dict)
    """Variant, python and ray of the image; empty where it did not answer."""
    records: tuple[int, ...] = ()
    """Versions of a deployment's record that the head's image reads."""
    node_pool: dict[str, Any] = field(default_factory=dict)
    """The stage's pool as EKS describes it; empty for static nodes."""
    upstream: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    exit_code: int = DeviceError.exit_code


class Probe:
    """A short pod, which exists while this context is entered."""

    def __init__(self, api: Api, job: Object, what: str, timeout_seconds: float) -> None:
        self._api, self._job, self._what = api, job, what
        self._timeout_seconds = timeout_seconds
        self._image = image_of(job["spec"]["template"]["spec"])
        self._uid = ""

    def __enter__(self) -> Self:
        self._uid = self._api.create(self._job)["metadata"]["uid"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._api.delete("Job", self._job["metadata"]["name"], uid=self._uid)

    def await_answer(self) -> Answer:
        """Wait for the pod's end, and report what it waits for, such as its image."""
        deadline = time.monotonic() + self._timeout_seconds
        report = ProgressPrinter(self._what).report
        waits, pull = "it has no pod yet", PullWatch()
        while time.monotonic() < deadline:
            for pod in self._api.find_all("Pod", f"job-name={self._job['metadata']['name']}"):
                if pod["status"].get("phase") in ("Succeeded", "Failed"):
                    return self._read_answer(pod)
                waits = explain_wait(self._api, pod)
                report(waits)
                if problem := pull.explain_end(pod, waits):
                    return Answer(problem=problem)
            time.sleep(POLL_SECONDS)
        problem = f"the probe of image {self._image} did not end: {waits}"
        return Answer(problem=problem, exit_code=EXIT_AGAIN)

    def _read_answer(self, pod: Object) -> Answer:
        terminated = _terminated_state(pod)
        exit_code = int(terminated.get("exitCode", EXIT_AGAIN))
        lines = self._read_log(pod)
        report = next(filter(None, map(_read_object, reversed(lines))), None)
        if report:
            return Answer(
                report["platform"],
                tuple(report.get("records", ())),
                report.get("node_pool", {}),
                report.get("upstream", []),
                report.get("problem"),
                exit_code,
            )
        said = " ".join(lines[-3:]) or str(terminated.get("message") or pod["status"].get("message", "nothing"))
        if any(each in said for each in OTHER_PROCESSOR):
            node = pod["spec"].get("nodeName")
            return Answer(
                problem=f"image {self._image} is built for another processor than that of {node} ({said}): build it "
                f"for that processor, or name another image with TAG="
            )
        if exit_code in STAGE_CODES:
            return Answer(problem=find_error_line("\n".join(lines)), exit_code=exit_code)
        is_lost = exit_code == EXIT_AGAIN
        problem = f"image {self._image} does not answer (exit code {exit_code}): {said}"
        return Answer(problem=problem, exit_code=EXIT_AGAIN if is_lost else DeviceError.exit_code)

    def _read_log(self, pod: Object) -> list[str]:
        """The container's log; empty where it never started."""
        try:
            return [line.partition(" ")[2] for line in self._api.log(pod["metadata"]["name"], CONTAINER)]
        except ApiUnreachable:
            raise
        except DeviceError:
            return []


def probe_head(api: Api, group: WorkerGroup) -> Probe:
    """A probe that asks the head's image for its platform, and for the versions of records that its deploy Jobs read.

    For a stage with a node pool it also describes the pool, with a deploy Job's account.
    """
    head = group.head_pod
    # No shell: the admission policies let a deploy Job's account run programs of the head's image alone.
    arguments = [f"--node-pool={group.node_pool}"] if group.node_pool else []
    command = ["python", "-m", "k8s.controller.head_facts"]
    job = render_probe_job(
        group, "head", head, head["containers"][0], {"command": command, "args": arguments}, {}, LEAST_SECONDS
    )
    if group.node_pool:
        for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
            metadata["labels"] = metadata["labels"] | {COMPONENT_LABEL: POOL_PROBE}
        pod = job["spec"]["template"]["spec"]
        pod["serviceAccountName"] = DEPLOYER
        pod["containers"][0]["env"] += aws_variables(group)
    return Probe(api, job, "asking the head's image", LEAST_SECONDS)


def probe_stage(
    api: Api, group: WorkerGroup, image: str, recipe: str, arguments: list[str], timeout_seconds: float
) -> Probe:
    """A probe that asks a stage's image whether it accepts the recipe and finds its upstream artifacts."""
    script = (
        'printf %s "$RECIPE" > "$TMPDIR/recipe.toml" && exec python -m services.common.process.readiness '
        f"--stage {group.name} --recipe $TMPDIR/recipe.toml --root {group.root} {shlex.join(arguments)}"
    )
    seconds = max(timeout_seconds, LEAST_SECONDS)
    # A pool has no nodes before the stage is deployed.
    is_beside_head = group.is_image_on_nodes or bool(group.node_pool)
    place = group.head_pod if is_beside_head else group.pod
    container = group.container | {"image": image}
    command = {"command": ["sh", "-c", script]}
    job = render_probe_job(group, group.name, place, container, command, {"RECIPE": recipe}, seconds)
    return Probe(api, job, f"asking the {group.name}'s image", seconds)


def render_probe_job(
    group: WorkerGroup,
    what: str,
    place: Object,
    container: Object,
    command: Object,
    environment: dict[str, str],
    seconds: float,
) -> Object:
    """A Job of one small container with the stage's mounts and account, on a node that the pod `place` may use."""
    labels = {STAGE_LABEL: group.name, COMPONENT_LABEL: "preflight"}
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": group.pod["serviceAccountName"],
        "automountServiceAccountToken": False,
        "securityContext": group.pod["securityContext"],
        **{name: place[name] for name in PLACEMENT_FIELDS if name in place},
        "volumes": [volume for volume in group.pod["volumes"] if volume["name"] != RECIPE.name],
        "containers": [
            {
                "name": CONTAINER,
                "image": container["image"],
                "imagePullPolicy": container["imagePullPolicy"],
                **command,
                "env": [{"name": name, "value": value} for name, value in environment.items()],
                "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
                "securityContext": group.container["securityContext"],
                "volumeMounts": [m for m in group.container["volumeMounts"] if m["name"] != RECIPE.name],
            }
        ],
    }
    name = f"preflight-{what}-{secrets.token_hex(3)}"
    return render_short_job(name, labels, pod, limit_seconds=int(seconds), kept_seconds=LEFTOVER_SECONDS)


def _terminated_state(pod: Object) -> Object:
    statuses = pod["status"].get("containerStatuses") or []
    return dict(statuses[0]["state"].get("terminated") or {}) if statuses else {}


def _read_object(line: str) -> dict[str, Any] | None:
    """An image's answer; None for any other line."""
    try:
        report = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "platform" in report else None
