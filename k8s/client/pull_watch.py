"""Watches a pod until it starts, and recognises the states of kubelet in which it never will."""

from __future__ import annotations

import time

from k8s.objects.api import Api, Object
from k8s.objects.placement import PASSING, explain_start

PULL_PATIENCE_SECONDS = 90.0
"""Seconds of failed pulls after which a pod is given up. kubelet retries after 10, 20 and 40 s, so it has tried four
times."""
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
OTHER_PROCESSOR = ("no match for platform", "exec format error")
BUILD_ANOTHER = "build it for that processor, or name another image with TAG="
STOPPED = (137, 143)
"""Exit codes of a container that was told to stop, or killed with its pod."""


class PullWatch:
    """Watches pods that have not started."""

    def __init__(self) -> None:
        self._failing_since: dict[str, float] = {}  # by the pod's uid

    def explain_end(self, pod: Object, waits: str) -> str:
        """The reason why the pod will never start; empty while it may. `waits` describes what it waits for."""
        (name, reason), uid = _waiting(pod), pod["metadata"]["uid"]
        if reason in HOPELESS:
            return f"{_image_of(pod, name)} cannot run: {waits}"
        if reason not in PULL_ERRORS:
            self._failing_since.pop(uid, None)
            return ""
        failing_since = self._failing_since.setdefault(uid, time.monotonic())
        what = f"image {_image_of(pod, name)} cannot be pulled on {pod['spec'].get('nodeName')}: {waits}"
        if any(each in waits for each in OTHER_PROCESSOR):
            return f"{what}. It is built for another processor than the node's: {BUILD_ANOTHER}"
        if time.monotonic() - failing_since <= PULL_PATIENCE_SECONDS:
            return ""
        return (
            f"{what}. Does the tag exist, do the nodes reach that registry, and may they pull from it? make images "
            f"PUSH=... pushes this checkout's images, TAG= names another image"
        )


def explain_crash(pod: Object, ends: tuple[int, ...]) -> str:
    """The reason why a container ended otherwise than with these exit codes, or than with its pod; empty where none
    did.
    """
    for name, state in _states(pod):
        ended = state.get("terminated") or {"exitCode": 0}
        is_killed = ended["exitCode"] in STOPPED and ended.get("reason") != "OOMKilled"
        if ended["exitCode"] in ends or is_killed:
            continue
        image, lines = _image_of(pod, name), str(ended.get("message") or ended.get("reason", "nothing")).splitlines()
        said = " ".join(lines[-3:])
        if any(each in said for each in OTHER_PROCESSOR):
            node = pod["spec"].get("nodeName")
            return f"image {image} is built for another processor than that of {node} ({said}): {BUILD_ANOTHER}"
        return f"image {image} does not answer (exit code {ended['exitCode']}): {said}"
    return ""


def explain_wait(api: Api, pod: Object) -> str:
    """Describe what a pod that has not started waits for, such as the pull of an image."""
    name, reason = _waiting(pod)
    if name and reason in PASSING:
        events = api.find_all("Event", fields=f"involvedObject.uid={pod['metadata']['uid']}")
        own = {each["reason"] for each in events if f"{{{name}}}" in each["involvedObject"].get("fieldPath", "")}
        if "Pulling" in own and not own & {"Pulled", "Failed"}:
            return f"pulling {_image_of(pod, name)} on {pod['spec'].get('nodeName')}"
    return explain_start(api, pod)


def _waiting(pod: Object) -> tuple[str, str]:
    """The first container of a pod that waits, and kubelet's reason for it; empty where none waits."""
    waiting = [(name, str(state["waiting"].get("reason", ""))) for name, state in _states(pod) if "waiting" in state]
    return waiting[0] if waiting else ("", "")


def _states(pod: Object) -> list[tuple[str, Object]]:
    """The states of a pod's containers, in the order in which they run."""
    status = pod.get("status") or {}
    statuses = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return [(each["name"], each.get("state") or {}) for each in statuses]


def _image_of(pod: Object, container: str) -> str:
    containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    return next(str(each["image"]) for each in containers if each["name"] == container)
