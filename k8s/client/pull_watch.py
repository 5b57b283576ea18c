"""Watches a pod until it starts, and recognises the states of kubelet in which it never will."""

from __future__ import annotations

import time

from k8s.objects.api import Api, Object
from k8s.objects.placement import PASSING, explain_start
from k8s.objects.worker_group import image_of

PULL_PATIENCE_SECONDS = 90.0
"""Seconds of failed pulls after which a pod is given up. kubelet retries after 10, 20 and 40 s, so it has tried four
times."""
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
OTHER_PROCESSOR = ("no match for platform", "exec format error")


class PullWatch:
    """Watches one pod that has not started."""

    def __init__(self) -> None:
        self._failing_since: float | None = None

    def explain_end(self, pod: Object, waits: str) -> str:
        """The reason why the pod will never start; empty while it may. `waits` describes what it waits for."""
        reason, image = waiting_reason(pod), image_of(pod["spec"])
        if reason in HOPELESS:
            return f"{image} cannot run: {waits}"
        if reason not in PULL_ERRORS:
            return ""
        self._failing_since = self._failing_since or time.monotonic()
        is_other = any(each in waits for each in OTHER_PROCESSOR)
        if not is_other and time.monotonic() - self._failing_since <= PULL_PATIENCE_SECONDS:
            return ""
        advice = (
            "Does the tag exist, do the nodes reach that registry, and may they pull from it? make images PUSH=... "
            "pushes this checkout's images, TAG= names another image"
        )
        if is_other:
            advice = (
                "It is built for another processor than the node's: build it for that processor, or name another image "
                "with TAG="
            )
        return f"image {image} cannot be pulled on {pod['spec'].get('nodeName')}: {waits}. {advice}"


def explain_wait(api: Api, pod: Object) -> str:
    """Describe what a pod that has not started waits for, such as the pull of its image."""
    if waiting_reason(pod) in PASSING:
        events = api.find_all("Event", fields=f"involvedObject.uid={pod['metadata']['uid']}")
        reasons = {event.get("reason") for event in events}
        if "Pulling" in reasons and "Pulled" not in reasons and "Failed" not in reasons:
            return f"pulling {image_of(pod['spec'])} on {pod['spec'].get('nodeName')}"
    return explain_start(api, pod)


def waiting_reason(pod: Object) -> str:
    """kubelet's reason why a pod's container waits; empty where it does not wait."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return str((statuses[0]["state"].get("waiting") or {}).get("reason", "")) if statuses else ""
