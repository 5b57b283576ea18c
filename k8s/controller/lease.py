"""The Lease of a stage. One deploy Job's process holds it, and renews it while it works.

Whether a holder is alive is judged as client-go does: by changes of the Lease, over the reader's own monotonic clock.
The times in it are those of another machine and are for people.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from k8s.objects.api import Api, Conflict, Object
from k8s.objects.names import STAGE_LABEL, lease_name

LEASE_SECONDS = 30


class LeaseHeld(Exception):
    """Another process holds the stage, or took it over."""


class StageLease:
    """The lease of one stage, for one holder. `hold` takes it or renews it."""

    def __init__(self, api: Api, stage: str, holder: str) -> None:
        self._api, self._stage, self._holder = api, stage, holder
        self._seen: tuple[str, float] = ("", 0.0)  # another holder's version of it, and since when it is that one

    def hold(self) -> None:
        """Take or renew. Raises `LeaseHeld` while another holder renews it, and as long after that as it was taken for.

        That time begins when this process first looks.
        """
        lease = self._api.find("Lease", lease_name(self._stage))
        try:
            if lease is None:
                self._api.create(self._body({}))
                return
            holder = lease["spec"].get("holderIdentity")
            if holder not in (None, "", self._holder) and not self._is_expired(lease):
                raise LeaseHeld(f"{holder} holds the lease of {self._stage}")
            self._api.replace(self._body(lease))
        except Conflict as error:
            raise LeaseHeld(str(error)) from error

    def release(self) -> None:
        lease = self._api.find("Lease", lease_name(self._stage))
        if lease and lease["spec"].get("holderIdentity") == self._holder:
            self._api.delete("Lease", lease_name(self._stage), uid=lease["metadata"]["uid"])

    def _is_expired(self, lease: Object) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        seconds = lease["spec"].get("leaseDurationSeconds") or LEASE_SECONDS
        return time.monotonic() - self._seen[1] > seconds

    def _body(self, lease: Object) -> Object:
        metadata: dict[str, Any] = {"name": lease_name(self._stage), "labels": {STAGE_LABEL: self._stage}}
        if lease:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
