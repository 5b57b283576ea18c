"""The wait for a pod's image: which words of kubelet mean that the pod will never begin."""

from __future__ import annotations

import time

from k8s.objects.api import Api, Object
from k8s.objects.placement import PASSING, explain_start
from k8s.objects.worker_group import image_of

# kubelet pulls again after 10, 20, 40 s: a registry that is away for a moment has been asked four times by then.
PULL_PATIENCE_SECONDS = 90.0
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
OTHER_PROCESSOR = ("no match for platform", "exec format error")


class PullWatch:
    """Watches one pod that has not begun."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._failing_since: float | None = None

    def explain_end(self, pod: Object, waits: str) -> str:
        """Why the pod will not begin, where that is certain by now; else empty. `waits` is what it waits for."""
        reason = waiting_reason(pod)
        if reason in HOPELESS:
            return f"{self._image} cannot run: {waits}"
        if reason not in PULL_ERRORS:
            return ""
        self._failing_since = self._failing_since or time.monotonic()
        is_other = any(each in waits for each in OTHER_PROCESSOR)
        if not is_other and time.monotonic() - self._failing_since <= PULL_PATIENCE_SECONDS:
            return ""
        advice = (
            "Does the tag exist, may the nodes pull from that registry, and do they reach it? make images PUSH=... "
            "pushes what this checkout builds, TAG= names another image"
        )
        if is_other:
            advice = (
                "It is built for another processor than the node's: build it for that one, or name another with TAG="
            )
        return f"image {self._image} cannot be pulled on {pod['spec'].get('nodeName')}: {waits}. {advice}"


def explain_wait(api: Api, pod: Object) -> str:
    """What a pod that has not begun waits for, in a sentence; also a pull that goes well."""
    if waiting_reason(pod) in PASSING:
        events = api.find_all("Event", fields=f"involvedObject.uid={pod['metadata']['uid']}")
        reasons = {event.get("reason") for event in events}
        if "Pulling" in reasons and "Pulled" not in reasons and "Failed" not in reasons:
            return f"pulling {image_of(pod['spec'])} on {pod['spec'].get('nodeName')}"
    return explain_start(api, pod)


def waiting_reason(pod: Object) -> str:
    """Kubelet's word for what a pod's container waits for; empty where it does not wait."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return str((statuses[0]["state"].get("waiting") or {}).get("reason", "")) if statuses else ""
