"""A short pod that looks at what only a pod can see: the artifacts on the file system, and an image's platform."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from dataclasses import dataclass
from typing import Any

from k8s.deploy.announcements import Announcements
from k8s.deploy.api import Api, Object
from k8s.deploy.deployment import EXIT_AGAIN
from k8s.deploy.names import COMPONENT_LABEL, STAGE_LABEL
from k8s.deploy.placement import explain_start
from k8s.deploy.stage import Stage
from services.common.errors import DeviceError

POLL_SECONDS = 0.5
TIMEOUT_SECONDS = 600.0  # the head's image may have to be pulled
HOPELESS = ("ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
LEFTOVER_SECONDS = 300  # a probe whose client was killed goes by itself


@dataclass(frozen=True)
class ProbeResult:
    platform: dict[str, str]
    upstream: list[dict[str, Any]]
    problem: str | None
    exit_code: int = DeviceError.exit_code


def probe(api: Api, stage: Stage, images: dict[str, str], recipe: str, arguments: list[str]) -> dict[str, ProbeResult]:
    """Run `services.common.readiness` in each of the images, by name, with the stage's mounts and account."""
    name = f"preflight-{stage.name}-{secrets.token_hex(3)}"
    job = api.create(_job(name, stage, images, recipe, arguments))
    try:
        return _await_results(api, name, list(images))
    finally:
        api.delete("Job", name, uid=job["metadata"]["uid"])


def _job(name: str, stage: Stage, images: dict[str, str], recipe: str, arguments: list[str]) -> Object:
    head = stage.head_pod
    labels = {STAGE_LABEL: stage.name, COMPONENT_LABEL: "preflight"}
    script = (
        'printf %s "$RECIPE" > "$TMPDIR/$$.toml" && exec python -m services.common.readiness '
        f"--stage {stage.name} --recipe $TMPDIR/$$.toml --root {stage.root} {shlex.join(arguments)}"
    )
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": stage.pod["serviceAccountName"],
        "automountServiceAccountToken": False,
        "securityContext": stage.pod["securityContext"],
        "nodeSelector": head.get("nodeSelector", {}),
        "tolerations": head.get("tolerations", []),
        "volumes": [volume for volume in stage.pod["volumes"] if volume["name"] != "recipe"],
        "containers": [
            {
                "name": container,
                "image": image,
                "imagePullPolicy": stage.container["imagePullPolicy"],
                "command": ["sh", "-c", script],
                "env": [{"name": "RECIPE", "value": recipe}],
                "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
                "securityContext": stage.container["securityContext"],
                "volumeMounts": [m for m in stage.container["volumeMounts"] if m["name"] != "recipe"],
            }
            for container, image in images.items()
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(TIMEOUT_SECONDS),
            "ttlSecondsAfterFinished": LEFTOVER_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _await_results(api: Api, name: str, containers: list[str]) -> dict[str, ProbeResult]:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    announcements = Announcements("looking at the artifacts")
    waits = "no pod was made"
    while time.monotonic() < deadline:
        for pod in api.find_all("Pod", f"job-name={name}"):
            if pod["status"]["phase"] in ("Succeeded", "Failed"):
                return {container: _read_result(api, pod, container) for container in containers}
            waits = explain_start(api, pod)
            announcements.say(waits)
            if any(reason in waits for reason in HOPELESS):
                return dict.fromkeys(containers, ProbeResult({}, [], waits))
        time.sleep(POLL_SECONDS)
    failed = ProbeResult({}, [], f"the short pod that looks at the artifacts did not end: {waits}", EXIT_AGAIN)
    return dict.fromkeys(containers, failed)


def _exit_code(pod: Object, container: str) -> int:
    ended = {each["name"]: each["state"].get("terminated") or {} for each in pod["status"]["containerStatuses"]}
    return int(ended[container].get("exitCode", EXIT_AGAIN))


def _read_result(api: Api, pod: Object, container: str) -> ProbeResult:
    lines = [line.partition(" ")[2] for line in api.log(pod["metadata"]["name"], container)]
    for line in reversed(lines):
        if line.startswith("{"):
            told = json.loads(line)
            return ProbeResult(told["platform"], told["upstream"], told["problem"], _exit_code(pod, container))
    said = " ".join(lines[-3:]) or str(pod["status"].get("message", "nothing"))
    return ProbeResult({}, [], f"the short pod that looks at the artifacts failed in {container}: {said}")
