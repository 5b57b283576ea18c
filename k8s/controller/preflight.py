"""Judges the answer of a stage's image, which an init container gives before the controller starts in the same pod."""

from __future__ import annotations

import json
from typing import Any

from deploy.exit_codes import EXIT_AGAIN, find_error_line
from k8s.objects.api import Api
from k8s.objects.deployment import Deployment
from k8s.objects.names import PREFLIGHT
from k8s.objects.record import Acceptance, Outcome
from services.common.errors import ArtifactError, DeviceError, RecipeError, StorageError
from services.common.hardware.image_platform import describe_platform

STAGE_CODES = (RecipeError.exit_code, ArtifactError.exit_code, StorageError.exit_code, EXIT_AGAIN)
"""Exit codes of the check itself, after which its last line says why; every other one is a crash."""


def read_answer(api: Api, pod: str) -> str | None:
    """The init container's last lines, then the exit code of its check; None until kubelet has reported its end."""
    status = (api.find("Pod", pod) or {}).get("status") or {}
    states = [each["state"] for each in status.get("initContainerStatuses") or [] if each["name"] == PREFLIGHT]
    ended = states[0].get("terminated") if states else None
    return None if ended is None else str(ended.get("message", ""))


def judge(deployment: Deployment, answer: str) -> Acceptance | Outcome:
    """Whether the image accepts the recipe, finds its artifacts and may join the head, or the deployment's end."""
    *lines, code = answer.strip().splitlines() or [""]
    exit_code, image = int(code) if code.isdigit() else DeviceError.exit_code, deployment.image
    report = next(filter(None, map(_read_object, reversed(lines))), None)
    problem = report["problem"] if report else find_error_line("\n".join(lines))
    if not report and exit_code not in STAGE_CODES:
        return Outcome(DeviceError.exit_code, f"image {image} does not answer (exit code {exit_code}): {problem}")
    if report and problem and exit_code == RecipeError.exit_code:
        problem = f"the image {image} does not accept this recipe: {problem} Correct it with RECIPE= or ARGS=."
    if not report or problem:
        return Outcome(exit_code or DeviceError.exit_code, problem)
    if deployment.mode == "shared" and (difference := _compare(image, report["platform"])):
        return Outcome(DeviceError.exit_code, difference)
    upstream = [f"{each['schema']} {each['name']}/{each['id']}" for each in report["upstream"]]
    return Acceptance(report["platform"]["ray"], upstream)


def _compare(image: str, found: dict[str, str]) -> str:
    """The difference to the head, whose image this program runs in: Ray refuses nodes with another Ray or Python."""
    head = describe_platform()
    for what in ("variant", "python", "ray"):
        if found[what] != head[what]:
            return (
                f"image {image} has {what} {found[what]}, but the Ray head has {head[what]}, and Ray requires the "
                f"same. Build both images from one checkout (make images), or use a cluster of its own: MODE=isolated"
            )
    return ""


def _read_object(line: str) -> dict[str, Any] | None:
    """The report of services.common.process.readiness; None for any other line."""
    try:
        report = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "platform" in report else None
