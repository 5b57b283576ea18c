"""The probes of preflight: short pods that look at what only a pod sees, an image's platform and the artifacts.

Each asks one image about itself. The head's looks beside the head. A stage's that is pulled looks where the stage's
pods will be, since what it pulls is needed there anyway; one that is brought to the nodes, or whose nodes come with the
deployment, looks beside the head, too.
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
from deploy.progress import Progress
from deploy.stage_contract import RECIPE
from k8s.client.pull_watch import OTHER_PROCESSOR, PullWatch, explain_wait
from k8s.objects.api import Api, ApiUnreachable, Object
from k8s.objects.deploy_job import aws_variables
from k8s.objects.names import COMPONENT_LABEL, DEPLOYER, STAGE_LABEL
from k8s.objects.worker_group import WorkerGroup, image_of
from services.common.errors import ArtifactError, DeviceError, RecipeError, StorageError

POLL_SECONDS = 0.5
LEAST_SECONDS = 600.0  # for an image that may have to be pulled
LEFTOVER_SECONDS = 300  # a probe whose client was killed goes by itself
CONTAINER = "look"
POOL_PROBE = "preflight-pool"  # the component of a probe that asks EKS: the network lets it
PLACEMENT_FIELDS = ("nodeSelector", "tolerations", "affinity", "imagePullSecrets")
STAGE_CODES = (RecipeError.exit_code, ArtifactError.exit_code, StorageError.exit_code)


@dataclass(frozen=True)
class Answer:
    """What an image said, or why it could not."""

    platform: dict[str, str] = field(default_factory=dict)
    """Variant, python and ray; empty where it could not be seen."""
    records: tuple[int, ...] = ()
    """Versions of a deployment's record that the head's image reads."""
    node_pool: dict[str, Any] | None = None
    """What the head's image sees of the stage's pool; None from one that knows no pools."""
    upstream: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    exit_code: int = DeviceError.exit_code


class Probe:
    """One short pod, for as long as this is entered."""

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
        """Wait for the pod's end, as long as its image is being pulled, too, and tell what is waited for."""
        deadline = time.monotonic() + self._timeout_seconds
        report = Progress(self._what).report
        waits, pull = "no pod was made", PullWatch(self._image)
        while time.monotonic() < deadline:
            for pod in self._api.find_all("Pod", f"job-name={self._job['metadata']['name']}"):
                if pod["status"].get("phase") in ("Succeeded", "Failed"):
                    return self._read_answer(pod)
                waits = explain_wait(self._api, pod)
                report(waits)
                if problem := pull.explain_end(pod, waits):
                    return Answer(problem=problem)
            time.sleep(POLL_SECONDS)
        problem = f"the short pod that looks at {self._image} did not end: {waits}"
        return Answer(problem=problem, exit_code=EXIT_AGAIN)

    def _read_answer(self, pod: Object) -> Answer:
        terminated = _terminated_state(pod)
        exit_code = int(terminated.get("exitCode", EXIT_AGAIN))
        lines = self._read_log(pod)
        told = next(filter(None, map(_read_object, reversed(lines))), None)
        if told:
            return Answer(
                told["platform"],
                tuple(told.get("records", ())),
                told.get("node_pool"),
                told.get("upstream", []),
                told.get("problem"),
                exit_code,
            )
        said = " ".join(lines[-3:]) or str(terminated.get("message") or pod["status"].get("message", "nothing"))
        if any(each in said for each in OTHER_PROCESSOR):
            node = pod["spec"].get("nodeName")
            return Answer(
                problem=f"image {self._image} cannot run on {node}, which has another processor than it is built for "
                f"({said}): build it for that one, or name another with TAG="
            )
        if exit_code in STAGE_CODES:
            return Answer(problem=find_error_line("\n".join(lines)), exit_code=exit_code)
        is_lost = exit_code == EXIT_AGAIN
        problem = f"image {self._image} does not answer (exit code {exit_code}): {said}"
        return Answer(problem=problem, exit_code=EXIT_AGAIN if is_lost else DeviceError.exit_code)

    def _read_log(self, pod: Object) -> list[str]:
        """Nothing of a container that never began."""
        try:
            return [line.partition(" ")[2] for line in self._api.log(pod["metadata"]["name"], CONTAINER)]
        except ApiUnreachable:
            raise
        except DeviceError:
            return []


def probe_head(api: Api, group: WorkerGroup) -> Probe:
    """Asks the head's image for its platform, and for the records that its deploy Jobs read.

    Where the stage's nodes come from a pool, it looks at that, too, as a deploy Job would: with its account.
    """
    head = group.head_pod
    # No shell: the admission policies let a deploy Job's account run programs of the head's image alone.
    arguments = [f"--node-pool={group.node_pool}"] if group.node_pool else []
    command = ["python", "-m", "k8s.controller.head_facts"]
    job = _job(group, "head", head, head["containers"][0], {"command": command, "args": arguments}, {}, LEAST_SECONDS)
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
    """Asks a stage's image whether it takes the recipe, and finds what it needs."""
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
    job = _job(group, group.name, place, container, command, {"RECIPE": recipe}, seconds)
    return Probe(api, job, f"asking the {group.name}'s image", seconds)


def _job(
    group: WorkerGroup,
    what: str,
    place: Object,
    container: Object,
    command: Object,
    environment: dict[str, str],
    seconds: float,
) -> Object:
    """The stage's mounts and account, on a node that suits the pod `place`, with one small container."""
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
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"preflight-{what}-{secrets.token_hex(3)}", "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(seconds),
            "ttlSecondsAfterFinished": LEFTOVER_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _terminated_state(pod: Object) -> Object:
    statuses = pod["status"].get("containerStatuses") or []
    return dict(statuses[0]["state"].get("terminated") or {}) if statuses else {}


def _read_object(line: str) -> dict[str, Any] | None:
    """An image's answer; None for any other line."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) and "platform" in told else None
