"""Recognises pods that will never start, by the states that kubelet reports."""

from __future__ import annotations

import time

from k8s.objects.api import Api, Object
from k8s.objects.placement import explain_start, image_in, newest_event, statuses_of

PULL_PATIENCE_SECONDS = 90.0
"""Seconds of failed pulls after which a pod is given up. kubelet retries after 10, 20 and 40 s, so it has tried four
times."""
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
HOPELESS = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError")
STOPPED = (137, 143)
"""Exit codes of a container that was told to stop, or killed with its pod."""


class PullWatch:
    """Watches pods that have not started."""

    def __init__(self) -> None:
        self._failing_since: dict[str, float] = {}  # by the pod's uid

    def look(self, api: Api, job_uid: str, pods: list[Object]) -> tuple[str, str]:
        """What a Job waits for whose pods have not started, and why one never will; empty while it may."""
        waits = ""
        for pod in pods:
            waits = explain_start(api, pod)
            if problem := self._explain_end(pod, waits):
                return waits, problem
        # Without a pod, as where the quota is used up, the Job's events say why.
        return waits or newest_event(api, {"metadata": {"uid": job_uid}}) or "it has no pod yet", ""

    def _explain_end(self, pod: Object, waits: str) -> str:
        """The reason why the pod will never start; empty while it may. `waits` describes what it waits for."""
        waiting = [(each["name"], (each.get("state") or {}).get("waiting")) for each in statuses_of(pod)]
        name, reason = next(((name, state.get("reason")) for name, state in waiting if state), ("", ""))
        uid = pod["metadata"]["uid"]
        if reason in HOPELESS:
            return f"{image_in(pod, name)} cannot run: {waits}"
        if reason not in PULL_ERRORS:
            self._failing_since.pop(uid, None)
            return ""
        if time.monotonic() - self._failing_since.setdefault(uid, time.monotonic()) <= PULL_PATIENCE_SECONDS:
            return ""
        return (
            f"image {image_in(pod, name)} cannot be pulled on {pod['spec'].get('nodeName')}: {waits}. Does the tag "
            f"exist for the node's processor, do the nodes reach that registry, and may they pull from it? make images "
            f"PUSH=... pushes this checkout's images, TAG= names another image"
        )


def explain_crash(pod: Object, ends: tuple[int, ...]) -> str:
    """The reason why a container ended otherwise than with these exit codes, or than with its pod; empty where none
    did.
    """
    for status in statuses_of(pod):
        ended = (status.get("state") or {}).get("terminated") or {"exitCode": 0}
        is_killed = ended["exitCode"] in STOPPED and ended.get("reason") != "OOMKilled"
        if ended["exitCode"] in ends or is_killed:
            continue
        lines = str(ended.get("message") or ended.get("reason", "nothing")).splitlines()
        image = image_in(pod, status["name"])
        return f"image {image} does not answer (exit code {ended['exitCode']}): {' '.join(lines[-3:])}"
    return ""
